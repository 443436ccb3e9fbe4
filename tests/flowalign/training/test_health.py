"""The notice for a run whose reward falls, from recorded rewards and in runs."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from flowalign.config import load, recipe
from flowalign.training.health import Health, fallen
from tests.flowalign.small_run import small_run

COLLAPSED = [
    0.536,
    0.574,
    0.648,
    0.639,
    0.587,
    0.633,
    0.561,
    0.725,
    0.691,
    0.705,
    0.674,
    0.629,
    0.66,
    0.747,
    0.743,
    0.663,
    0.798,
    0.663,
    0.738,
    0.785,
    0.756,
    0.714,
    0.731,
    0.763,
    0.723,
    0.71,
    0.725,
    0.802,
    0.796,
    0.777,
    0.738,
    0.773,
    0.785,
    0.757,
    0.724,
    0.724,
    0.729,
    0.728,
    0.71,
    0.715,
    0.673,
    0.699,
    0.689,
    0.758,
    0.728,
    0.661,
    0.681,
    0.693,
    0.771,
    0.78,
    0.737,
    0.74,
    0.754,
    0.748,
    0.667,
    0.802,
    0.819,
    0.799,
    0.748,
    0.747,
    0.742,
    0.807,
    0.752,
    0.734,
    0.787,
    0.758,
    0.79,
    0.767,
    0.781,
    0.738,
    0.835,
    0.726,
    0.776,
    0.762,
    0.704,
    0.756,
    0.685,
    0.725,
    0.72,
    0.613,
    0.661,
    0.632,
    0.493,
    0.621,
    0.658,
    0.545,
    0.669,
    0.57,
    0.604,
    0.63,
    0.684,
    0.696,
    0.52,
    0.587,
    0.624,
]
"""mean reward by iteration of tiny_sd3/short_flow_grpo with all weights, a constant rate of 2e-4, seed 100"""


def test_a_recorded_collapse_is_seen_once_it_is_there_and_not_before() -> None:
    seen = [end for end in range(1, len(COLLAPSED) + 1) if fallen(COLLAPSED[:end])]
    assert 80 <= seen[0] <= 90 and seen == list(range(seen[0], len(COLLAPSED) + 1))
    best, now = fallen(COLLAPSED) or (0, 0)
    assert best == pytest.approx(max(np.convolve(COLLAPSED[:-10], np.full(10, 0.1), "valid")))
    assert now == pytest.approx(np.mean(COLLAPSED[-10:]))


@pytest.mark.parametrize("slope", [0.0, 0.001])
def test_noise_around_a_level_or_a_climb_is_no_fall(slope: float) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        rewards = (0.5 + slope * np.arange(200) + rng.normal(0, 0.05, 200)).tolist()
        assert not any(fallen(rewards[:end]) for end in range(20, 201, 5))


def test_a_schedule_that_ends_is_not_told_of_its_rate(caplog: pytest.LogCaptureFixture) -> None:
    training = load(recipe("tiny_sd3/short_flow_grpo")).training
    for rates, warnings in (([1e-3] * len(COLLAPSED), 1), (np.linspace(1e-3, 0, len(COLLAPSED)).tolist(), 0)):
        health = Health(training)
        with caplog.at_level(logging.WARNING):
            for iteration, (reward, rate) in enumerate(zip(COLLAPSED, rates, strict=True), start=1):
                health.see(iteration, {"reward/mean": reward, "learning_rate": rate})
        assert len(caplog.records) == warnings
        caplog.clear()


@pytest.mark.parametrize("keeps_best", [False, True])
def test_the_warning_names_the_signs_that_grew_and_what_is_not_set_yet(
    caplog: pytest.LogCaptureFixture, keeps_best: bool
) -> None:
    health = Health(load(recipe("tiny_sd3/nft")).training, keeps_best)
    with caplog.at_level(logging.WARNING):
        for iteration, reward in enumerate(COLLAPSED, start=1):
            signs = {"matching/kl": 1e-3 * iteration**2, "policy/gradient_norm": 0.04 + 2e-4 * iteration}
            signs["matching/error"] = 0.6 + 0.01 * iteration
            health.see(iteration, {"reward/mean": reward, "learning_rate": 1e-3, **signs})
    (message,) = [record.getMessage() for record in caplog.records]
    end = int(message.split(":")[0].removeprefix("iteration "))
    then, now = (1e-3 * np.mean(np.arange(start, start + 10) ** 2) for start in (1, end - 9))
    assert f"; the distance to the start weights went from {then:.2g} to {now:.2g}; " in message
    assert "; the matching error went from 0.66 to 1.4; it may fall further" in message
    assert "a larger algorithm.kl_weight" in message and "gradient's norm" not in message
    assert ("keep_best" in message) != keeps_best


def test_a_run_whose_reward_falls_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls = 0

    def worse(samples: Sequence, prompts: Sequence[str]) -> list[float]:
        nonlocal calls
        calls += 1
        return [1 - 0.02 * calls + 0.01 * i for i in range(len(samples))]

    own = ["training.iterations=24", "training.group_size=2", "training.prompts_per_iteration=1", "training.previews=0"]
    run = small_run("tiny_sd3/flow_grpo_early", tmp_path, *own, "training.optimizer.schedule=constant", reward=worse)
    with caplog.at_level(logging.WARNING):
        run.train()
    messages = [record.getMessage() for record in caplog.records]
    (warning,) = [message for message in messages if "the mean reward of training was" in message]
    assert "training.ema_decay: 0.97" in warning and "training.optimizer.learning_rate (it is" in warning


def test_held_out_scores_that_fall_are_told_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    level = 1.0

    def reward(samples: Sequence, prompts: Sequence[str]) -> list[float]:
        return [level + 0.01 * i for i in range(len(samples))]

    own = ["evaluation.prompts=shapes_heldout", "evaluation.limit=4", "training.previews=0"]
    run = small_run("tiny_sd3/flow_grpo_early", tmp_path, *own, reward=reward)
    run.health.rate = run.health.highest = 1e-3
    with caplog.at_level(logging.WARNING):
        run.evaluate()
        assert not caplog.records
        level = 0.5
        run.evaluate()
    assert "the held-out reward is 0." in caplog.text
