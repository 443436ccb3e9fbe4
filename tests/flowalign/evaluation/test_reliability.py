"""Judges whose noise, order bias and sensitivity are known by construction."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flowalign.errors import ConfigError
from flowalign.evaluation.reliability import Reliability, measure
from rewards import Scores, Spec

GROUPS, MEMBERS = 40, 6
TRUTH = np.random.default_rng(7).normal(size=GROUPS * MEMBERS)
"""What a perfect judge says: in a group its standard deviation is 1."""
PROMPTS = [f"prompt {n // MEMBERS}" for n in range(len(TRUTH))]


class Noisy:
    """Says the truth of a picture, whose number is its colour, with noise; smaller pictures are worth less."""

    name = "noisy"
    spec = Spec(deterministic=False)

    def __init__(self, noise: float, per_size: float = 0.0, seed: int = 0, slope: float = 1.0) -> None:
        self.noise, self.per_size, self.slope = noise, per_size, slope
        self.rng = np.random.default_rng(seed)

    def truth(self, samples: Sequence[Image.Image]) -> np.ndarray:
        rows = [sample.getpixel((0, 0)) for sample in samples]
        truth = TRUTH[[red + 256 * green for red, green, _ in rows]]
        return truth + self.per_size * np.array([sample.width < 8 for sample in samples])

    def __call__(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Any) -> Scores:
        value = self.slope * (self.truth(samples) + self.noise * self.rng.normal(size=len(samples)))
        return Scores(torch.tensor(value))


class Leaning(Noisy):
    """Prefers the first of two by `lean` wherever it is not sure."""

    def __init__(self, lean: float) -> None:
        super().__init__(0.0)
        self.lean = lean

    def compare(self, first: Any, second: Any, prompts: Any, metadata: Any) -> Scores:
        chance = 1 / (1 + np.exp(self.truth(second) - self.truth(first)))
        return Scores(torch.tensor((1 - 2 * self.lean) * chance + 2 * self.lean))


def pictures() -> list[Image.Image]:
    return [Image.new("RGB", (8, 8), (n % 256, n // 256, 0)) for n in range(len(TRUTH))]


def measured(judge: Any, **settings: Any) -> Reliability:
    return measure(judge, pictures(), PROMPTS, [{}] * len(TRUTH), **({"sizes": ()} | settings))


def holds(interval: Any, truth: float) -> bool:
    return interval.low <= truth <= interval.high and interval.low <= interval.mean <= interval.high


@pytest.mark.parametrize("noise", [0.3, 1.0])
def test_known_noise_lies_in_the_interval_nearly_always(noise: float) -> None:
    group = np.mean([np.var(TRUTH[i : i + MEMBERS], ddof=1) for i in range(0, len(TRUTH), MEMBERS)])
    results = [measured(Noisy(noise, seed=seed)) for seed in range(12)]
    assert sum(holds(result.noise, noise) for result in results) >= 10
    assert sum(holds(result.reliability, group / (group + noise**2)) for result in results) >= 10
    # the mean of k verdicts has the reliability 0.8 where k = 4 var(e) / var(t)
    assert sum(holds(result.needed, max(1, np.ceil(4 * noise**2 / group))) for result in results) >= 10


def test_noise_alone_needs_endless_verdicts_and_no_noise_needs_one() -> None:
    exact = measured(Noisy(0.0), draws=2)
    assert exact.noise.mean == exact.noise.high == 0 and exact.needed.mean == 1 and exact.reliability.mean == 1
    blind = Noisy(1.0)
    blind.truth = lambda samples: np.zeros(len(samples))  # type: ignore[method-assign]
    result = measured(blind)
    assert result.needed.high == np.inf and result.reliability.low < 0.1


def test_another_size_and_wording_show_what_they_change() -> None:
    wordings = {"same": Noisy(0.0, slope=3.0), "other": Noisy(0.5, seed=3)}
    result = measured(Noisy(0.0, per_size=0.4), sizes=(0.5,), wordings=wordings)
    size = result.disturbances["size 0.5"]
    # a shift that all share teaches nothing and turns no pair
    assert size.shift.mean == pytest.approx(0.4) and size.noise.mean < 1e-6 and size.turned.mean == 0
    same, other = result.disturbances["wording same"], result.disturbances["wording other"]
    assert same.noise.mean < 1e-6 and same.turned.mean == 0
    # half of the variance of a difference, after the other wording's spread is brought to the first one's
    spread = np.sqrt(np.mean([np.var(TRUTH[i : i + MEMBERS], ddof=1) for i in range(0, len(TRUTH), MEMBERS)]))
    correlation = spread / np.hypot(spread, 0.5)
    assert holds(other.noise, spread * np.sqrt(1 - correlation)) and 0.05 < other.turned.mean < 0.3


def test_another_wording_is_told_from_the_noise_of_asking_again() -> None:
    """A wording with another opinion on each sample, of deviation d, differs by d / sqrt(2) beyond the retest."""
    opinion = np.random.default_rng(1).normal(size=len(TRUTH))
    other = Noisy(0.4, seed=5)
    other.truth = lambda samples: TRUTH + 0.8 * opinion  # type: ignore[method-assign]
    judge = Noisy(0.4)
    result = measured(judge, wordings={"same": Noisy(0.4, seed=4), "other": other})
    same, changed = result.disturbances["wording same"], result.disturbances["wording other"]
    assert same.noise.mean > 0.3 and same.beyond.low == 0 and same.beyond.high < 0.2
    spread = [
        np.mean([np.var(values[i : i + MEMBERS], ddof=1) for i in range(0, len(TRUTH), MEMBERS)])
        for values in (TRUTH, TRUTH + 0.8 * opinion)
    ]
    # the other one's spread is brought to the first one's, with the noise in both
    factor = ((spread[0] + 0.16) / (spread[1] + 0.16)) ** 0.5
    left = (factor - 1) * TRUTH + factor * 0.8 * opinion
    wanted = np.mean([np.var(left[i : i + MEMBERS], ddof=1) for i in range(0, len(TRUTH), MEMBERS)])
    extra = (factor**2 - 1) * 0.16
    assert holds(changed.beyond, ((wanted + extra) / 2) ** 0.5) and changed.beyond.low > 0.2


@pytest.mark.parametrize("lean", [0.0, 0.15])
def test_order_bias_is_found(lean: float) -> None:
    result = measured(Leaning(lean), draws=2)
    assert result.prefers_first is not None and result.prefers_first.mean == pytest.approx(lean, abs=1e-6)
    assert (result.disturbances["order"].turned.mean > 0.02) == (lean > 0)
    assert result.verdicts == GROUPS * MEMBERS * (MEMBERS - 1) and result.noise.mean == 0


def test_labels_tell_calibration() -> None:
    rng = np.random.default_rng(0)
    chance = 1 / (1 + np.exp(-TRUTH))
    labels = rng.random(len(TRUTH)) < chance
    judge = Noisy(0.0)
    judge.truth = lambda samples: chance[: len(samples)]  # type: ignore[method-assign]
    result = measured(judge, labels=labels).labels
    assert result is not None and result.brier is not None and result.auc_in_groups is not None
    good, bad = chance[labels], chance[~labels]
    assert result.auc.mean == pytest.approx((good[:, None] > bad).mean())
    assert holds(result.brier, float((chance * (1 - chance)).mean()))
    # it is calibrated by construction
    inside = [each["low"] <= each["mean"] <= each["high"] for each in result.curve]
    assert sum(inside) >= len(inside) - 1 and sum(each["samples"] for each in result.curve) == len(TRUTH)
    with pytest.raises(ConfigError, match="labels are all good"):
        measured(judge, labels=[True] * len(TRUTH))


def test_groups_are_wanted() -> None:
    with pytest.raises(ConfigError, match="two samples or more of two prompts"):
        measure(Noisy(0.0), pictures()[:3], ["a", "a", "b"], [{}] * 3)
