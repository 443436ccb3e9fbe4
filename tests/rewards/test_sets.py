"""Rewards of sets, against values worked out otherwise."""

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.linalg import sqrtm

from rewards import SetReward, score, spec_of
from rewards.sets import FrechetDistance, Vendi, frechet_distance, vendi_score


def grey(level: int) -> Image.Image:
    return Image.new("RGB", (16, 16), (level, level, level))


@pytest.mark.parametrize("counts", [(40, 50), (4, 3)])
def test_the_frechet_distance_is_that_of_gaussians(counts: tuple[int, int]) -> None:
    """Also of fewer pictures than dimensions, where covariances are singular."""
    first, second = (torch.randn(count, 6) @ torch.randn(6, 6) + k for k, count in enumerate(counts))
    means, covariances = zip(
        *((x.double().mean(0).numpy(), np.cov(x.double().T)) for x in (first, second)), strict=True
    )
    root = sqrtm(covariances[0] @ covariances[1])
    wanted = ((means[0] - means[1]) ** 2).sum() + np.trace(covariances[0] + covariances[1] - 2 * root.real)
    assert frechet_distance(first, second) == pytest.approx(wanted, rel=1e-3)
    assert frechet_distance(first, first) == pytest.approx(0, abs=1e-9)


def test_vendi_counts_what_is_different() -> None:
    assert vendi_score(torch.eye(4)) == pytest.approx(4)
    assert vendi_score(torch.eye(4)[[0, 0, 1, 1]]) == pytest.approx(2)
    assert vendi_score(torch.ones(5, 3)) == pytest.approx(1)


def test_a_value_says_what_a_picture_contributes(tmp_path) -> None:
    for level in (100, 140):
        grey(level).save(tmp_path / f"{level}.png")
    reward = FrechetDistance(str(tmp_path))
    assert isinstance(reward, SetReward) and spec_of(reward).kind == "set"
    # the last is far from the exemplars
    pictures = [grey(100), grey(140), grey(120), grey(250)]
    scores = score(reward, pictures, ["x"] * 4, [{}] * 4)
    whole = reward.of_set(reward.features(pictures))
    assert scores.value.mean().item() == pytest.approx(whole, rel=1e-5) and whole < 0
    assert scores.value.argmin() == 3
    rest = [reward.of_set(reward.features([p for j, p in enumerate(pictures) if j != i])) for i in (0, 3)]
    assert (scores.value[0] - scores.value[3]).item() == pytest.approx(rest[1] - rest[0], rel=1e-4)
    # of two alike each adds less than one that is like no other
    colours = [Image.new("RGB", (16, 16), colour) for colour in ("red", "red", "blue")]
    assert score(Vendi(), colours, ["x"] * 3, [{}] * 3).value.argmax() == 2
    with pytest.raises(ValueError, match="has 0 pictures"):
        FrechetDistance(str(tmp_path / "none"))
