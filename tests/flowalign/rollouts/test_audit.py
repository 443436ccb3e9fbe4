"""Noise that repeats among prompts and processes ends a run; noise that a group shares on purpose does not."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flowalign.data import batches
from flowalign.errors import FlowalignError
from flowalign.policies.diffusion import policy as policies
from flowalign.rollouts.audit import CHANCE, _check
from samplers import derive_seed
from tests.flowalign.small_run import small_run


@pytest.mark.parametrize(
    ("name", "starts"),
    [
        # 4 groups that share their start noise, 4 groups of 8, 4 trees, branches of 4 trunks, texts
        ("tiny_sd3/flow_grpo", 4),
        ("tiny_sd3/nft", 32),
        ("tiny_sd3/branch_grpo", 4),
        ("tiny_sd3/g2rpo", 4),
        ("tiny_lm/grpo", None),
    ],
)
def test_runs_count_what_they_draw(name: str, starts: int | None, tmp_path: Path) -> None:
    run = small_run(name, tmp_path).train()
    [metrics] = run.metrics
    assert metrics.get("noise/starts") == starts
    assert metrics["noise/seeds"] >= 4


def test_seeds_that_repeat_among_prompts_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "derive_seed", lambda seed, iteration, group, *rest: derive_seed(group % 2, *rest))
    with pytest.raises(FlowalignError, match=r"iteration 0: start noises: 4 are drawn, and 2 of them.*seeds repeat"):
        small_run("tiny_sd3/flow_grpo", tmp_path).train()


@pytest.mark.parametrize("name", ["nft", "flow_grpo"])
def test_a_pipeline_that_leaves_its_seeds_ends_a_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def same(seeds: Any) -> Any:
        return [torch.Generator().manual_seed(0) for _ in seeds]

    monkeypatch.setattr(policies, "generators", same)
    with pytest.raises(FlowalignError, match="1 of them are distinct: the pipeline did not use its seeds"):
        small_run(f"tiny_sd3/{name}", tmp_path).train()


def test_one_collision_by_chance_is_none() -> None:
    # a pair of 1152 seeds of 32 bits is one in 1 of 6,500 iterations; two pairs are not seen
    _check(1152, 1151, "", True)
    for draws, distinct in ((1152, 1150), (8, 7), (1152, 288)):
        with pytest.raises(FlowalignError):
            _check(draws, distinct, "", True)
    # a million seeds have about 116 pairs
    expected = 1e12 / 2**33
    _check(10**6, 10**6 - int(expected), "", True)
    tail = [k for k in range(400) if math.exp(k * math.log(expected) - math.lgamma(k + 1)) < CHANCE]
    with pytest.raises(FlowalignError):
        _check(10**6, 10**6 - max(tail), "", True)


def test_step_noise_of_a_direct_call_is_not_its_start_noise(tiny_policy: Callable[..., Any]) -> None:
    trajectory = tiny_policy().sample(["a red circle"] * 2, [3, 4], steps=3, kernel="flow_sde", eta=0.7).trajectory
    step, sigma = trajectory.latents[:, 1] - trajectory.latents[:, 0], trajectory.sigmas
    start = trajectory.latents[:, 0].flatten(1)
    # what is left without the drift of the first step, whose sigma is 1
    noise = step - trajectory.velocity[:, 0] * (sigma[1] - sigma[0])
    correlation = torch.cosine_similarity(noise.flatten(1), start)
    again = tiny_policy().sample(["a red circle"] * 2, [3, 4], noise_seeds=[3, 4], steps=3, kernel="flow_sde", eta=0.7)
    other = (
        again.trajectory.latents[:, 1]
        - again.trajectory.latents[:, 0]
        - again.trajectory.velocity[:, 0] * (sigma[1] - sigma[0])
    )
    assert correlation.abs().max() < 0.7 * torch.cosine_similarity(other.flatten(1), start).abs().min()
