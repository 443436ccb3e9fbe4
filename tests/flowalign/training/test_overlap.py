"""Overlap keeps the order and the numbers, and hides the time."""

import time

import pytest
import torch

from flowalign.training.overlap import overlapped


def test_same_numbers_in_the_same_order():
    def rollouts():
        for i in range(5):
            torch.manual_seed(i)
            yield i, torch.randn(100)

    apart = [(i, noise, noise.sum()) for i, noise in rollouts()]
    together = [(i, noise, value) for (i, noise), value in overlapped(rollouts(), lambda rollout: rollout[1].sum())]
    assert len(together) == 5
    for (i, noise, value), (j, other, same) in zip(apart, together):
        assert i == j and torch.equal(noise, other) and torch.equal(value, same)


def test_scoring_is_hidden_behind_sampling():
    count, seconds = 8, 0.2

    def rollouts():
        for i in range(count):
            time.sleep(seconds)
            yield i

    def score(rollout):
        time.sleep(seconds)  # a reward that takes as long as the rollout, elsewhere
        return rollout

    begin = time.perf_counter()
    assert [value for _, value in overlapped(rollouts(), score)] == list(range(count))
    hidden = 1 - (time.perf_counter() - begin - count * seconds) / (count * seconds)
    assert hidden >= 0.8  # 7/8 in theory


def test_errors_of_either_side_come_through():
    def failing(rollout):
        raise RuntimeError("no score")

    with pytest.raises(RuntimeError, match="no score"):
        list(overlapped(iter([1, 2, 3]), failing))

    def broken():
        yield 1
        raise RuntimeError("no rollout")

    with pytest.raises(RuntimeError, match="no rollout"):
        list(overlapped(broken(), lambda rollout: rollout))


def test_nothing_to_do():
    assert list(overlapped([], lambda rollout: rollout)) == []
