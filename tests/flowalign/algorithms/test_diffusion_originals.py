"""Steps, advantages and losses of denoising against verl-omni's and Flow-Factory's (core/originals/README.md)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowalign import registry
from flowalign.core.divergences import gaussian_kl
from flowalign.core.groups import group_advantage
from flowalign.core.losses import clipped_policy_loss
from flowalign.core.step_losses import dppo_mask, guard_log_ratio
from samplers import transition
from tests.flowalign.algorithms.matching.made_points import gradient, method, points

RECORDED = json.loads((Path(__file__).parents[1] / "core" / "originals" / "diffusion.json").read_text())
GIVEN = {name: torch.tensor(values) for name, values in RECORDED["inputs"].items()}
ADVANTAGE = torch.tensor(RECORDED["advantages"]["group"])
KERNELS = {"sde": ("flow_sde", 0.7), "cps": ("cps_published", 0.8), "dance_sde": ("dance_sde", 0.3)}
DT, STD = 0.35, 0.6 * 0.35**0.5


def close(made: Tensor, expected: Any) -> None:
    torch.testing.assert_close(made, torch.as_tensor(expected), atol=1e-5, rtol=1e-5)


def leaf(name: str) -> Tensor:
    return GIVEN[name].clone().requires_grad_()


@pytest.mark.parametrize("project", ["verl_omni", "flow_factory"])
@pytest.mark.parametrize("kind", KERNELS)
def test_steps_have_their_means_log_probabilities_and_gradients(project: str, kind: str) -> None:
    """From the first step, where sigma is 1."""
    name, eta = KERNELS[kind]
    for k, expected in enumerate(RECORDED["steps"][project][kind]):
        v, sigmas = leaf("velocity"), GIVEN["sigmas"]
        step = [level.expand(len(v)) for level in (sigmas[k], sigmas[k + 1], torch.tensor(eta))]
        made = transition(registry.resolve("kernels", name), GIVEN["x"], v, *step, next=GIVEN["next"])
        close(made.mean, expected["mean"])
        close(made.log_prob, expected["log_prob"])
        close(torch.autograd.grad(made.log_prob.sum(), v)[0], expected["gradient"])


def test_advantages_are_verl_omnis() -> None:
    for scale in ("batch", "group"):
        made = group_advantage(GIVEN["reward"], GIVEN["group"], scale, unbiased=True)
        close(made, RECORDED["advantages"][scale])


@pytest.mark.parametrize("name", ["flow_grpo", "grpo_guard", "flow_dppo"])
def test_policy_losses_are_verl_omnis(name: str) -> None:
    log_prob, mean = leaf("log_prob"), leaf("mean")
    old, advantage, std = GIVEN["old_log_prob"], ADVANTAGE.clamp(-1, 1), torch.full((6, 1, 1), STD)
    inputs = (log_prob, mean) if name == "grpo_guard" else (log_prob,)
    if name == "flow_grpo":
        loss = clipped_policy_loss(log_prob, old, advantage, 1e-3, 1e-3).mean()
    elif name == "grpo_guard":
        log_ratio = guard_log_ratio(log_prob, old, mean, GIVEN["old_mean"], std)
        loss = clipped_policy_loss(log_ratio, torch.zeros(6), advantage, 1e-3, 1e-3).mean() / DT
    else:
        ratio = (log_prob - old).exp()
        moved = gaussian_kl(mean, GIVEN["old_mean"], std)
        loss = (-dppo_mask(ratio, ADVANTAGE, moved, 2e-3) * ADVANTAGE * ratio).mean()
    close(loss, RECORDED[name]["loss"])
    for made, expected in zip(torch.autograd.grad(loss, inputs), RECORDED[name]["gradients"], strict=True):
        close(made, expected)
    # rows on both sides of the clip, and of the mask
    assert 0 < (torch.tensor(RECORDED[name]["gradients"][0]) == 0).sum() < 6


def at(velocity: Tensor) -> Any:
    clean = {key: GIVEN[key] for key in ("x0", "noise", "sigma", "old", "reference")}
    return points(velocity, advantage=ADVANTAGE, **clean)


def test_nft_is_verl_omnis() -> None:
    algorithm, here = method("nft", beta=0.3, kl_weight=1e-2), at(leaf("velocity"))
    losses = algorithm.loss(here)[0].mean() + algorithm.penalized(torch.zeros(6), here)[0].mean()
    close(losses, RECORDED["nft"]["loss"])
    close(gradient(algorithm, here)[1] / 6, RECORDED["nft"]["gradients"][0])


@pytest.mark.parametrize("weighting", RECORDED["awm"])
def test_awm_is_flow_factorys(weighting: str) -> None:
    algorithm = method("awm", weighting=weighting, advantage_max=1.0, old_weight=0.0, kl_weight=0.0)
    _, made = gradient(algorithm, at(leaf("velocity")))
    close(made / 6, RECORDED["awm"][weighting]["gradients"][0])
