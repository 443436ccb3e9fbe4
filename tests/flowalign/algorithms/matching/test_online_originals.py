"""The losses of nft, awm, dgpo and crd against the authors' own lines (originals/record_online.py)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.flowalign.algorithms.matching.made_points import method, points

NUMBERS = load_file(Path(__file__).parent / "originals" / "online.safetensors")

CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "nft/1/all": ("nft", {}, 1),
    "nft/0.1/all": ("nft", {"beta": 0.1}, 1),
    **{
        f"nft/0.5/{mode}": ("nft", {"beta": 0.5, "mode": mode}, 1)
        for mode in ("positive_only", "negative_only", "one_only", "binary")
    },
    **{f"awm/{weighting}": ("awm", {"weighting": weighting}, 1) for weighting in ("t", "t**2", "huber", "ghuber")},
    "awm/uniform": ("awm", {"weighting": "uniform"}, 1),
    "dgpo/reference": ("dgpo", {"beta": 2, "clip_range": 0.02}, 3),
    "dgpo/old": ("dgpo", {"beta": 3, "clip_range": 0.1, "against": "old"}, 3),
    "crd/mean": ("crd", {"beta": 0.7}, 3),
    "crd/plain": ("crd", {"beta": 0.7, "adaptive": False}, 3),
    "crd/softmax": ("crd", {"beta": 0.7, "temperature": 0.4}, 3),
    "crd/bce": ("crd", {"beta": 0.7, "objective": "bce"}, 3),
}


def test_every_recorded_number_is_compared() -> None:
    assert {name.rpartition("/")[0] for name in NUMBERS if "/" in name} == set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_the_authors_lines(case: str) -> None:
    name, settings, size = CASES[case]
    algorithm = method(name, kl_weight=0.1, **settings)
    inputs = {key: NUMBERS[key] for key in ("x0", "noise", "sigma", "old", "reference")}
    advantage = NUMBERS["advantage"]
    # DGPO's lines clip advantages themselves; ours leave it to the advantage's own setting
    advantage = advantage.clamp(-5, 5) if name == "dgpo" else advantage
    velocity = NUMBERS["velocity"].clone().requires_grad_()
    at = points(velocity, advantage=advantage, size=size, **inputs)
    loss, _ = algorithm.loss(at)
    penalty, _ = algorithm.penalized(torch.zeros_like(at.error), at)
    total = loss.mean() + penalty.mean()
    total.backward()
    torch.testing.assert_close(velocity.grad, NUMBERS[f"{case}/gradient"], atol=1e-6, rtol=1e-5)
    # AWM's value has a ratio of 1, which the gradient does not need
    if name != "awm":
        torch.testing.assert_close(total.detach(), NUMBERS[f"{case}/loss"][0], atol=1e-6, rtol=1e-5)
