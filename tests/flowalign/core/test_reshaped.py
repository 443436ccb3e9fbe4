"""Advantages that reshape GRPO's: literal versions over lists, COPO's with the numbers of its authors' code."""

import math
from collections import Counter

import pytest
import torch

from flowalign.core import losses, reshaped
from flowalign.core.groups import group_advantage
from flowalign.core.record import Actions, Record
from rewards.text.form import Frequency

GROUP = torch.arange(4).repeat_interleave(4)


def record(reward: torch.Tensor) -> Record:
    mask = torch.arange(5) < torch.tensor([5, 3, 1, 4] * 4)[:, None]
    log_prob = -torch.rand(16, 5, generator=torch.Generator().manual_seed(0))
    return Record(
        reward=reward, group=GROUP, mask=mask, log_prob=log_prob, rewards=reward[None], reward_weights=torch.ones(1)
    )


def test_only_the_best_and_the_worst_of_a_group_learn() -> None:
    reward = torch.randn(16, generator=torch.Generator().manual_seed(1))
    made = reshaped.filtered(record(reward), best=1, worst=2)
    plain = group_advantage(reward, GROUP, unbiased=True)
    for g in range(4):
        members = sorted(range(4 * g, 4 * g + 4), key=lambda i: -reward[i])
        assert made[members[1]] == 0
        assert all(made[i] == plain[i] != 0 for i in (members[0], *members[2:]))
    # a reward model that is right about the extremes alone: its middle members are noise
    truth = torch.tensor([1.0, 0.0, 0.0, 0.0] * 4)
    scores = torch.tensor([2.0, 0.9, 0.8, -1.0, 2.0, 0.5, 0.9, -1.0, 2.1, 0.2, 0.8, -1.2, 1.9, 0.9, 0.1, -1.0])
    whole, ends = (reshaped.reliability(scores, truth, GROUP, *kept) for kept in ((4, 0), (1, 1)))
    left = [i for i in range(16) if i % 4 in (0, 3)]
    x, y = scores[left], truth[left]
    r = ((x - x.mean()) * (y - y.mean())).mean() / (x.std(correction=0) * y.std(correction=0))
    assert ends.item() == pytest.approx(r.item() ** 2, abs=1e-5) and ends > whole


def test_advantages_beyond_three_sigma_are_dropped() -> None:
    reward = torch.zeros(16)
    reward[0] = 1.0
    made, plain = reshaped.three_sigma(record(reward), largest=2.0), group_advantage(reward, GROUP, unbiased=True)
    mean = sum(plain.tolist()) / 16
    sigma = math.sqrt(sum((a - mean) ** 2 for a in plain.tolist()) / 16)
    assert made.tolist() == [a if abs(a - mean) <= 2 * sigma else 0.0 for a in plain.tolist()]
    assert made[0] == 0 and plain[0] > 1


def test_valuable_groups_weigh_more_within_bounds() -> None:
    reward = torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0])
    made = reshaped.value_smoothed(record(reward), hard=1.0, low=0.7, high=1.2)
    plain = group_advantage(reward, GROUP, unbiased=True)
    # rates 1/4, 1/2, 1 and 3/4: values 3/4 + 3/4, 1 + 1/2, none, 3/4 + 1/4; their mean is 4/3
    factors = [1.125, 1.125, 1.0, 0.75]
    assert made.tolist() == pytest.approx([factors[i // 4] * a for i, a in enumerate(plain.tolist())])
    bounded = reshaped.value_smoothed(record(reward), hard=1.0, low=0.8, high=1.1)
    assert bounded[0] / plain[0] == pytest.approx(1.1) and bounded[15] / plain[15] == pytest.approx(0.8)
    alike = torch.ones(16)
    assert not reshaped.value_smoothed(record(alike)).any()


def test_a_pre_clip_bounds_the_ratio_before_the_exponential() -> None:
    log_prob = torch.tensor([[0.0, -9.0, 8.0, 0.3]], requires_grad=True)
    old = torch.zeros(1, 4)
    actions = Actions(
        log_prob=log_prob,
        old_log_prob=old,
        advantage=torch.full((1, 4), -1.0),
        mask=torch.ones(1, 4, dtype=torch.bool),
        group=torch.zeros(1),
        reward=torch.zeros(1),
    )
    made, _ = losses.ppo(actions, largest_ratio=1000)
    assert made[0].tolist() == pytest.approx([1, 0.8, 1000, math.exp(0.3)], rel=1e-5)
    made.sum().backward()
    assert log_prob.grad is not None and log_prob.grad[0, 2] == 0 and log_prob.grad[0, 3] > 0
    assert losses.ppo(actions)[0][0, 2].item() == pytest.approx(math.exp(8), rel=1e-5)


def test_sure_texts_and_late_tokens_count_for_more() -> None:
    given = record(torch.tensor([1.0, 0.0, 0.0, 1.0] * 4))
    made = reshaped.confident_late(given, perplexity=0.2, position=0.3)
    plain = group_advantage(given.reward, GROUP, unbiased=True).tolist()
    length = given.mask.sum(1).tolist()
    ppl = [-sum(given.log_prob[i, : length[i]].tolist()) / length[i] for i in range(16)]
    mean = sum(ppl) / 16
    std = math.sqrt(sum((p - mean) ** 2 for p in ppl) / 16)
    for i in range(16):
        for t in range(5):
            place = t / max(1, length[i] - 1)
            bonus = 0.3 / (1 + math.exp(-5 * (2 * place - 1)))
            expected = plain[i] * (1 - 0.2 * (ppl[i] - mean) / std) + math.copysign(bonus, plain[i])
            assert made[i, t].item() == pytest.approx(expected if t < length[i] else 0.0, abs=1e-5)


def test_copo_compares_groups_where_a_group_agrees() -> None:
    """Rows of the authors' compute_grpo_outcome_advantage_with_global and 'soft with forced', written out."""
    answers = ["7", "7", "5", "9"] + ["3"] * 4 + ["1"] * 4 + ["2", "2", "2", "8"]
    reward = torch.tensor([1.0, 1, 0, 0] + [0.0] * 4 + [1.0] * 4 + [1.0, 1, 1, 0])
    given = record(reward)
    share = Frequency()(answers, [str(g) for g in GROUP.tolist()], [{}] * 16).value
    given.rewards, given.names = torch.stack([reward, share]), ("exact_match", "frequency")
    made = reshaped.copo(given)
    means = [reward[4 * g : 4 * g + 4].mean() for g in range(4)]
    for i in range(16):
        rows = slice(i // 4 * 4, i // 4 * 4 + 4)
        local = (reward[i] - reward[rows].mean()) / (reward[rows].std() + 1e-6)
        across = (means[i // 4] - torch.stack(means).mean()) / (torch.stack(means).std() + 1e-6)
        chances = torch.tensor([count / 4 for count in Counter(answers[rows]).values()])
        weight = torch.sigmoid(-(chances * chances.log2()).sum() - 0.5) * float(local != 0)
        assert made[i].item() == pytest.approx(float(weight * local + (1 - weight) * across), abs=1e-5)
    assert made[4] < 0 < made[8], "all wrong learns to avoid, all right to go on"


def test_an_anchored_value_teaches_where_members_do_not_differ() -> None:
    same = record(torch.full((16,), 0.5))
    assert group_advantage(same.reward, GROUP).abs().max() == 0
    made = reshaped.anchored(same, anchor=0.2, first=3)
    torch.testing.assert_close(made, torch.full((16, 5), 0.1).where(same.mask & (torch.arange(5) < 3), 0))
    # as its limit: with a small spread, so does the published form alpha Q / std with alpha = 0.2 std
    reward = 0.5 + 1e-6 * torch.arange(16.0)
    near = reshaped.anchored(record(reward), anchor=0.2, first=5, eps=1.0)
    torch.testing.assert_close(near, (0.2 * reward)[:, None].expand(16, 5).where(same.mask, 0), atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="from 0 on"):
        reshaped.anchored(record(reward - 1))
