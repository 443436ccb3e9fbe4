"""The losses of methods that learn from files, against their authors' code, closed forms and what must hold of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowalign.algorithms.matching.base import Points
from flowalign.algorithms.matching.dpo import DPO
from flowalign.algorithms.matching.kto import KTO
from flowalign.algorithms.matching.mapo import MaPO
from flowalign.algorithms.matching.sdpo import SDPO, safe_scale
from flowalign.algorithms.matching.soar import off_line
from flowalign.policies.diffusion import Noised

FILE = Path(__file__).parents[2] / "core" / "originals" / "files.json"
"""what the authors' code makes of these inputs; README.md beside it says how it was recorded"""
RECORDED: dict[str, Any] = json.loads(FILE.read_text())


def recorded(name: str) -> Tensor:
    return torch.tensor(RECORDED["inputs"][name])


def made(kind: Any, **settings: Any) -> Any:
    return kind(kind.Settings(**settings))


def points(target: Tensor, velocity: Tensor, reference: Tensor | None = None, sign: Tensor | None = None) -> Points:
    count = len(target)
    rows, ones = torch.arange(count), torch.ones(count)
    # so that the velocity to learn is the target
    noised = Noised(target * 0, target, ones / 2, rows, rows * 0, ones)
    return Points(noised, velocity, ones * 0, ones * 0 if sign is None else sign, rows, reference=reference)


def loss_and_gradient(
    method: Any, target: Tensor, velocity: Tensor, reference: Tensor | None = None, sign: Tensor | None = None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The losses, and the gradient of their sum."""
    velocity = velocity.clone().requires_grad_()
    loss, values = method.loss(points(target, velocity, reference, sign))
    (gradient,) = torch.autograd.grad(loss.sum(), velocity)
    return loss.detach(), gradient, values


def error_gradient(target: Tensor, velocity: Tensor) -> Tensor:
    return 2 * (velocity - target) / target[0].numel()


def close(mine: Any, theirs: Any) -> None:
    torch.testing.assert_close(torch.as_tensor(mine), torch.as_tensor(theirs), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "name, method",
    [
        ("dpo", made(DPO, beta=20.0)),
        ("mapo", made(MaPO, beta=0.1)),
        ("kto", made(KTO, beta=20.0, bad_weight=0.7)),
        ("kto_loss_averse", made(KTO, beta=20.0, bad_weight=0.7, utility="loss_averse")),
    ],
)
def test_losses_and_gradients_are_the_authors(name: str, method: Any) -> None:
    target, velocity, reference = (recorded(key) for key in ("target", "pred", "reference"))
    if name == "mapo":
        velocity = recorded("alike")
    if name.startswith("kto"):
        method.offset = torch.tensor(RECORDED[name]["offset"])
    sign = 2.0 * recorded("labels") - 1
    loss, gradient, _ = loss_and_gradient(method, target, velocity, reference, sign)
    close(loss.mean(), RECORDED[name]["loss"])
    close(gradient / len(loss), RECORDED[name]["gradient"])


@pytest.mark.parametrize(
    "name, settings",
    [
        ("sdpo", {"beta": 20.0, "mu": 0.9}),
        ("sdpo_dspo", {"pair_loss": "dspo", "beta": 0.5, "mu": 0.9}),
        ("sdpo_dmpo", {"pair_loss": "dmpo", "beta": 20.0, "mu": 0.9}),
    ],
)
def test_sdpo_is_the_authors_pair_by_pair(name: str, settings: dict[str, Any]) -> None:
    given = [recorded(key) for key in ("target", "pred", "reference")]
    loss, gradient, values = loss_and_gradient(made(SDPO, **settings), *given)
    close(loss, RECORDED[name]["loss"])
    # a pair after the other, each with its two pictures
    close(gradient.unflatten(0, (2, -1)).transpose(0, 1), RECORDED[name]["gradient"])
    close(values["sdpo/scale"], RECORDED[name]["scale"])
    assert values["sdpo/scale"].min() < 1


def test_soars_points_and_targets_are_the_authors() -> None:
    noise, clean, velocity = (recorded(key) for key in ("target", "reference", "pred"))
    theirs = {name: torch.tensor(value) for name, value in RECORDED["soar"].items()}
    s = theirs["sigma"].view(-1, 1, 1, 1)
    x = (1 - s) * clean + s * noise
    for states, sigma, target in zip(theirs["states"], theirs["sigma_back"], theirs["target"], strict=True):
        mine = off_line(x, noise, velocity, theirs["sigma"], theirs["sigma_to"], sigma)
        close(mine, states)
        close((mine - clean) / sigma.view(-1, 1, 1, 1), target)


def test_soars_target_is_the_velocity_where_the_model_is_exact() -> None:
    x0, noise = torch.randn(2, 5, 3, 2, 2).unbind()
    sigma, sigma_to, sigma_back = torch.rand(3, 5).sort(0, descending=True).values[[0, 2, 1]]
    s, back = sigma.view(-1, 1, 1, 1), sigma_back.view(-1, 1, 1, 1)
    x = off_line((1 - s) * x0 + s * noise, noise, noise - x0, sigma, sigma_to, sigma_back)
    torch.testing.assert_close((x - x0) / back, noise - x0, atol=1e-4, rtol=1e-4)


def test_gradients_at_the_reference_are_those_of_the_table() -> None:
    """At policy = reference every method's gradient in the velocity is a multiple of those of the errors."""
    target, velocity = torch.randn(2, 8, 3, 2, 2).unbind()
    own = error_gradient(target, velocity)
    chosen_and_rejected = torch.cat([own[:4], -own[4:]])
    _, gradient, _ = loss_and_gradient(made(DPO, beta=60.0), target, velocity, velocity)
    close(gradient, 60 / 4 * chosen_and_rejected)
    sign = torch.tensor([1.0, -1, -1, 1, 1, -1, 1, 1])
    weights = torch.where(sign > 0, 1.5, 0.5)
    method = made(KTO, beta=60.0, good_weight=1.5, bad_weight=0.5)
    _, gradient, _ = loss_and_gradient(method, target, velocity, velocity, sign)
    close(gradient, (60 / 4 * weights * sign).view(-1, 1, 1, 1) * own)
    # to first order in errors that are small and equal
    off = velocity - target
    small = target + 0.1 * off / off.square().mean((1, 2, 3), keepdim=True).sqrt()
    own = error_gradient(target, small)
    _, gradient, _ = loss_and_gradient(made(MaPO, beta=0.1), target, small)
    wanted = torch.cat([own[:4], own[4:] * 0]) + 0.1 * 1000 * 0.5 / 4 * torch.cat([own[:4], -own[4:]])
    torch.testing.assert_close(gradient, wanted, rtol=5e-3, atol=1e-5)


def test_swapping_chosen_and_rejected_flips_the_gradient() -> None:
    method = made(DPO, beta=60.0)
    target, velocity = torch.randn(2, 8, 3, 2, 2).unbind()
    swapped = torch.tensor([4, 5, 6, 7, 0, 1, 2, 3])
    _, one, _ = loss_and_gradient(method, target, velocity, velocity)
    _, other, _ = loss_and_gradient(method, target[swapped], velocity[swapped], velocity[swapped])
    torch.testing.assert_close(one, -other[swapped], atol=1e-3, rtol=1e-3)
    assert one.abs().max() > 0


def test_ktos_loss_is_the_same_with_labels_flipped_and_gains_negated() -> None:
    target, velocity, reference = torch.randn(3, 8, 3, 2, 2).unbind()
    sign = torch.tensor([1.0, -1, -1, 1, 1, -1, 1, 1])
    method = made(KTO, beta=3.0)
    one, _, values = loss_and_gradient(method, target, velocity, reference, sign)
    other, _, _ = loss_and_gradient(method, target, reference, velocity, -sign)
    torch.testing.assert_close(one, other)
    assert torch.equal(values["kto/accuracy"], ((values["kto/gain"] > 0) == (sign > 0)).float())


@pytest.mark.parametrize("mu", [0.0, 0.3, 0.9, 1.0])
def test_sdpo_lets_the_chosen_ones_error_fall_by_what_was_promised(mu: float) -> None:
    chosen, rejected = torch.randn(2, 200, 6)
    # many that point the same way, and some much larger
    rejected = (rejected + chosen) * torch.linspace(0.1, 5, 200)[:, None]
    scale = safe_scale(chosen, rejected, mu)
    change = (-(chosen - scale[:, None] * rejected) * chosen).sum(1)
    assert (change <= -mu * chosen.square().sum(1) + 1e-4).all()
    assert (scale < 1).any() and (scale <= 1).all() and (scale >= 0).all()
    # no smaller than it must be
    bound = torch.isclose(change, -mu * chosen.square().sum(1), atol=1e-4)
    assert (bound | (scale == 1)).all()
