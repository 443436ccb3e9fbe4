"""The losses of methods that learn from files, against their authors' code, closed forms and what must hold of them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from flowalign.algorithms.matching.base import Points
from flowalign.algorithms.matching.dpo import DPO
from flowalign.algorithms.matching.dragon import DRAGON
from flowalign.algorithms.matching.kto import KTO
from flowalign.algorithms.matching.mapo import MaPO
from flowalign.algorithms.matching.rpo import RPO
from flowalign.algorithms.matching.sdpo import SDPO, safe_scale
from flowalign.algorithms.matching.seppo import SePPO
from flowalign.algorithms.matching.soar import off_line
from flowalign.data.batches import Batch
from flowalign.policies.diffusion import Noised
from rewards import Scores, Spec

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
    noised = Noised(x0=target * 0, noise=target, sigma=ones / 2, samples=rows, level_index=rows * 0, error_weight=ones)
    return Points(
        noised=noised,
        velocity=velocity,
        advantage=ones * 0,
        reward=ones * 0 if sign is None else sign,
        group=rows,
        reference=reference,
    )


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
    """At policy = reference every method's gradient in the velocity is a multiple of the errors' gradients."""
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


def test_seppos_sample_counts_as_rejected_until_the_policy_gains_on_it() -> None:
    target, old = torch.randn(2, 4, 3, 2, 2).unbind()
    # the second pair's sample is learned too, the first one's is unlearned
    velocity = old + torch.tensor([0.1, 0.1, -0.1, 0.1]).view(-1, 1, 1, 1) * (target - old)
    of = points(target, velocity)
    of.old = old
    chosen, sampled = (of.error_old - of.error).chunk(2)
    _, values = made(SePPO, beta=2.0).loss(of)
    torch.testing.assert_close(
        values["preference/logit"], torch.stack([chosen[0] - sampled[0], chosen[1] + sampled[1]])
    )
    assert values["seppo/worse"].tolist() == [1, 0]
    _, values = made(SePPO, beta=2.0, anchor=False).loss(of)
    torch.testing.assert_close(values["preference/logit"], chosen - sampled)


def test_rpos_loss_is_the_pictures_error_and_the_labels_cross_entropy() -> None:
    target, velocity, reference = torch.randn(3, 4, 3, 2, 2).unbind()
    label = torch.tensor([1.0, 0.0]).repeat(2)
    loss, _, values = loss_and_gradient(made(RPO, beta=3.0), target, velocity, reference, label)
    error = (velocity - target).square().mean((1, 2, 3))
    chance = values["preference/logit"].sigmoid()
    torch.testing.assert_close(loss, error[:2] - torch.stack([chance[0], 1 - chance[1]]).log())


class Spread:
    """A reward of sets: how far apart the greys of pictures are."""

    name = "spread"
    spec = Spec(kind="set")

    def __call__(self, samples: Any, prompts: Any, metadata: Any) -> Scores:
        greys = torch.tensor([float(picture.getpixel((0, 0))[0]) for picture in samples])
        return Scores(greys.std().expand(len(samples)))


class SpreadOfFeatures(Spread):
    """The same, which says what it looks at."""

    def features(self, samples: Any) -> torch.Tensor:
        return torch.tensor([[float(picture.getpixel((0, 0))[0])] for picture in samples])

    def of_set(self, features: torch.Tensor) -> float:
        return float(features.std())


@pytest.mark.parametrize("reward", [Spread(), SpreadOfFeatures()])
def test_dragon_swaps_what_makes_a_set_better(reward: Any) -> None:
    method = made(DRAGON, beta=2.0)
    scorer = SimpleNamespace(reward=reward, calls=0, metadata=lambda batch, rows: [{} for _ in rows])
    batch = Batch(
        prompts=["a"] * 8,
        metadata=[{}] * 8,
        group=[0] * 4 + [1] * 4,
        seeds=[0] * 8,
        noise_seeds=[0] * 8,
        iteration=0,
        picks=[0] * 8,
    )
    # of each group the first two are in D+ at first, the third is the first one's partner
    greys = [100, 101, 130, 101, 102, 103, 102, 60]
    samples = [Image.new("RGB", (1, 1), (grey, grey, grey)) for grey in greys]
    scores = method.score(scorer, samples, batch)
    chosen = method.chosen(scores.value, batch)
    assert chosen.tolist() == [[2, 1, 0, 3], [4, 7, 6, 5]]
    assert scores.parts["set"][0] == pytest.approx(float(torch.tensor([130.0, 101, 102, 60]).std()))
    # a pair of two alike is worth nothing
    assert scores.value[[1, 3, 4, 6]].tolist() == [0, 0, 0, 0] and scores.value[2] == -scores.value[0] > 0
    by_samples = method.chosen(torch.tensor([1.0, 2, 3, 0, 5, 5, 4, 6]), batch)
    assert by_samples.tolist() == [[2, 1, 0, 3], [4, 7, 6, 5]]


def test_dragon_learns_from_pairs_that_differ_alone() -> None:
    method = made(DRAGON, beta=60.0)
    target, velocity = torch.randn(2, 4, 3, 2, 2).unbind()
    velocity = velocity.requires_grad_()
    of = points(target, velocity, velocity.detach())
    of.size, of.reward = 4, torch.tensor([2.0, 1, 0, 1])
    loss, _ = method.loss(of)
    (gradient,) = torch.autograd.grad(loss.sum(), velocity)
    own = error_gradient(target, velocity.detach())
    # the mean over two pairs, of which one is told apart
    wanted = 60 / 4 / 2 * torch.stack([own[0], own[1] * 0, -own[2], own[3] * 0])
    close(gradient, wanted)
