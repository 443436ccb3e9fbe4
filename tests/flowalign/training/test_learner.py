"""A run that learns nothing says so, once; one that learns does not."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowalign.config import Optimizer, load, recipe
from flowalign.core.subsampling import inclusion, subsample
from flowalign.errors import ConfigError, FlowalignError
from flowalign.training import Trainer
from flowalign.training.optimization import MOST_SKIPPED, Optimization
from tests.flowalign.small_run import small_run
from tests.flowalign.training.small_run import settings

TEXT = {
    "model": {"kind": "text", "path": "tiny_lm", "lora": {"rank": 2, "alpha": 8}},
    "data": {"prompts": "sums_train"},
    "rewards": [{"name": "exact_match"}],
    "algorithm": {"name": "grpo"},
    "rollout": {"max_new_tokens": 3},
}


def constant(samples: list, prompts: list[str]) -> list[float]:
    return [0.1] * len(samples)


def alternating(samples: list, prompts: list[str]) -> list[float]:
    return [float(i % 2) for i in range(len(samples))]


def brightness(images: list, prompts: list[str]) -> list[float]:
    return [float(np.asarray(image).mean() / 255) for image in images]


class Crooked(torch.autograd.Function):
    """x as it is, with a gradient of infinity in one element at these calls."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, infinite: bool) -> torch.Tensor:
        ctx.infinite = infinite
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone()
        if ctx.infinite:
            gradient[0] = float("inf")
        return gradient, None


def update(optimization: Optimization, infinite: bool) -> None:
    weight = optimization.parameters["w"]
    optimization.backward(lambda rows: (Crooked.apply(weight, infinite)[rows], {}), torch.arange(4), 4, 2)
    optimization.step()


def test_an_infinite_gradient_moves_nothing_and_a_few_in_a_row_end_the_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    optimization = Optimization([{"w": weight}], Optimizer(), 10, torch.device("cpu"), ema_decay=0.5)
    update(optimization, infinite=False)
    before, average = weight.detach().clone(), optimization.ema.shadow_params[0].clone()
    for _ in range(2):
        for _ in range(MOST_SKIPPED - 1):
            update(optimization, infinite=True)
        assert torch.equal(weight, before) and torch.equal(optimization.ema.shadow_params[0], average)
        update(optimization, infinite=False)
        assert optimization.skipped == 0 and torch.isfinite(weight).all() and not torch.equal(weight, before)
        before, average = weight.detach().clone(), optimization.ema.shadow_params[0].clone()
    assert [record.getMessage() for record in caplog.records] == [
        "an update was skipped: the gradients of finite losses are not finite (their norm is inf)"
    ] * 2
    with pytest.raises(FlowalignError, match=f"{MOST_SKIPPED} updates in a row were skipped: the gradients of finite"):
        for _ in range(MOST_SKIPPED):
            update(optimization, infinite=True)


def test_skipped_updates_are_counted_and_left_out_of_the_means(tmp_path: Path) -> None:
    trainer = Trainer(
        settings(tmp_path, **{"training.iterations": 2, "training.checkpoint_every": 0}),
        reward=brightness,
        progress=False,
    )
    step, calls = trainer.learner._clip, 0

    def infinite_once() -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            next(iter(trainer.learner.parameters.values())).grad[0, 0] = float("inf")
        return step()

    trainer.learner._clip = infinite_once
    trainer.train()
    first, second = trainer.metrics.read()
    assert first["policy/skipped_updates"] == 1 and "policy/skipped_updates" not in second
    assert np.isfinite(list(first.values())).all()
    assert all(torch.isfinite(value).all() for value in trainer.learner.parameters.values())


@pytest.fixture
def warnings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """Of a run of two iterations."""

    def train(reward: Any, **changes: Any) -> list[str]:
        few = {"training.iterations": 2, "training.checkpoint_every": 0}
        with caplog.at_level(logging.WARNING):
            Trainer(settings(tmp_path, **{**changes, **few}), reward=reward, progress=False).train()
        return [record.getMessage() for record in caplog.records if record.name == "flowalign.training.learner"]

    return train


@pytest.mark.parametrize("medium", [{}, TEXT], ids=["pictures", "text"])
def test_rewards_that_are_all_alike_are_named_once_with_what_helps(
    medium: dict[str, Any], warnings: Callable[..., list[str]]
) -> None:
    [warning] = warnings(constant, **medium)
    assert "iteration 0 taught nothing" in warning and "reward/zero_spread" in warning
    assert "training.group_size" in warning and ("share_start_noise" in warning) == (not medium)


def test_a_gradient_of_0_is_named_once_with_its_causes(warnings: Callable[..., list[str]]) -> None:
    # no completion of one token ends
    cut = {**TEXT, "algorithm": {"name": "grpo", "mask_truncated": True}, "rollout": {"max_new_tokens": 1}}
    [warning] = warnings(alternating, **cut)
    assert "iteration 0 taught nothing" in warning and "policy/gradient_norm" in warning
    assert "rollout.max_new_tokens" in warning


@pytest.mark.parametrize(
    ("reward", "changes"),
    [
        (brightness, {}),
        (alternating, TEXT),
        # it learns from groups that are all wrong
        (lambda texts, prompts: [0.0] * len(texts), {**TEXT, "algorithm.advantage": {"name": "ngrpo"}}),
    ],
    ids=["pictures", "text", "ngrpo"],
)
def test_a_run_that_learns_is_left_in_peace(
    reward: Any, changes: dict[str, Any], warnings: Callable[..., list[str]]
) -> None:
    assert warnings(reward, **changes) == []


BY_ONES = {
    "model.dtype": "bfloat16",
    "training.prompts_per_iteration": 1,
    "training.group_size": 2,
    "training.micro_batch_size": 1,
    "training.updates_per_iteration": 1,
}
"""a single row is computed otherwise than a batch, and rounded"""


@pytest.mark.parametrize(
    "changes", [{}, {"algorithm.name": "grpo_guard"}, TEXT], ids=["pictures", "regulated ratios", "text"]
)
def test_ratios_to_a_replay_start_at_exactly_1_in_low_precision(changes: dict[str, Any], tmp_path: Path) -> None:
    replayed = {**changes, **BY_ONES, "training.old_log_prob": "replayed"}
    run = Trainer(settings(tmp_path, **replayed), reward=alternating, progress=False)
    experience = run.collect(run.groups.draw(0))
    # as an engine of other numerics might record them
    recorded = experience.rollout if changes is TEXT else experience.rollout.trajectory
    recorded.log_prob += 0.01
    metrics = run.learner.learn(experience, 0, 0.0)
    assert metrics["policy/ratio"] == 1
    assert metrics["policy/mismatch"] == pytest.approx(0.01, rel=0.9)


def test_rounding_that_reaches_the_clip_is_measured_every_iteration_and_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    narrow = {**BY_ONES, "algorithm.loss": {"clip_range": 1e-6}}
    run = Trainer(settings(tmp_path, **narrow), reward=alternating, progress=False)
    experience = run.collect(run.groups.draw(0))
    forwards = run.policy.forwards
    with caplog.at_level(logging.WARNING):
        measured = [run.learner.learn(experience, iteration, 0.0) for iteration in range(2)]
    # the one noisy step of three
    assert all(metrics["policy/mismatch"] == metrics["policy/mismatch/1"] > 5e-7 for metrics in measured)
    [warning] = [line for line in caplog.messages if "policy/mismatch" in line]
    assert "1e-06" in warning and "old_log_prob: replayed" in warning
    # which counts as no training: both updates were of two actions
    assert run.policy.forwards == forwards + 4


def test_a_checkpoint_keeps_the_scale_of_losses(tmp_path: Path) -> None:
    learner = Trainer(settings(tmp_path, **{"model.dtype": "float16"}), reward=alternating, progress=False).learner
    assert learner.scale is not None
    learner.scale.value, learner.scale.finite = 8.0, 3
    tensors, state = learner.state()
    written = json.loads(json.dumps(state))
    learner.scale.value, learner.scale.finite = 2.0, 0
    learner.load_state(tensors, written)
    assert (learner.scale.value, learner.scale.finite) == (8.0, 3)


@pytest.mark.parametrize("name", ["flow_grpo", "nft"])
def test_a_subsampled_update_has_the_weighted_gradients_of_its_items(name: str, tmp_path: Path) -> None:
    own = ["training.subsample={share: 0.4, by: advantage}", "training.group_size=4", "rollout.steps=2"]
    own += ["rollout.sigmas=[1.0, 0.5]", "training.prompts_per_iteration=2", "training.optimizer.max_grad_norm=1e9"]
    run = small_run(f"tiny_sd3/{name}", tmp_path, *own, "training.micro_batch_size=3", reward=brightness)
    learner = run.learner
    experience = run.collect(run.groups.draw(0))
    taken: dict[str, torch.Tensor] = {}
    learner.optimizer.step = lambda: taken.update({k: p.grad.clone() for k, p in learner.parameters.items()})

    def gradient(items: torch.Tensor, seed: int | None = None) -> torch.Tensor:
        learner.update(experience, items, seed=seed)
        return torch.cat([value.flatten() for value in taken.values()])

    items = experience.items
    each = torch.stack([gradient(items[[i]]) for i in range(len(items))]) / len(items)
    torch.testing.assert_close(each.sum(0), gradient(items), atol=1e-6, rtol=1e-4)
    probability = inclusion(experience.size(items), 0.4, 0.5)
    for seed in range(3):
        weights = subsample(probability, torch.Generator().manual_seed(seed))
        assert 0 < weights.count_nonzero() < len(items)
        torch.testing.assert_close(weights @ each, gradient(items, seed), atol=1e-6, rtol=1e-4)


def test_what_cannot_be_subsampled_is_refused() -> None:
    share = ["training.subsample={share: 0.5, by: advantage}"]
    with pytest.raises(ConfigError, match="training.subsample.by: 'raft' has no advantages; uniform works"):
        load(recipe("tiny_sd3/raft"), share).check(1)
    with pytest.raises(ConfigError, match="training.subsample: the loss of 'grpo' looks at whole groups"):
        load(recipe("tiny_lm/pacs"), share).check(1)
