"""Power beside simulated comparisons, and variances beside those that the scores were drawn with."""

import math
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import ttest_ind

from flowalign.errors import ConfigError
from flowalign.evaluation.power import Spread, chance, detectable, pictures_for, seeds_for, spread_of
from flowalign.evaluation.statistics import Interval


def drawn(rng: np.random.Generator, runs: int, prompts: int, pictures: int) -> NDArray[np.float64]:
    """Scores with var(a) = 0.02^2, var(b) = 1, var(c) = 0.1^2 and var(e) = 0.3^2."""
    seed, prompt = rng.normal(0, 0.02, (runs, 1, 1)), rng.normal(0, 1, (1, prompts, pictures))
    both, picture = rng.normal(0, 0.1, (runs, prompts, 1)), rng.normal(0, 0.3, (runs, prompts, pictures))
    return 0.7 + seed + prompt + both + picture


def test_variances_are_those_that_were_drawn() -> None:
    found = spread_of(drawn(np.random.default_rng(0), 400, 60, 4).tolist())
    assert found.seed == pytest.approx(4e-4, rel=0.2)
    assert found.prompt == pytest.approx(0.01, rel=0.05) and found.picture == pytest.approx(0.09, rel=0.02)
    expected = (4e-4 + (0.01 + 0.09 / 4) / 60) ** 0.5
    assert found.deviation(60, 4) == pytest.approx(expected, rel=0.06)
    assert found.measured.mean == pytest.approx(found.deviation(60, 4))
    assert found.measured.low is not None and found.measured.low < expected < (found.measured.high or 0)
    # one picture a prompt: its variance is in the prompts' own
    assert spread_of(drawn(np.random.default_rng(0), 400, 60, 1).tolist()).prompt == pytest.approx(0.1, rel=0.05)


def test_the_interval_of_the_spread_holds_the_truth() -> None:
    rng, truth = np.random.default_rng(1), (4e-4 + (0.01 + 0.09 / 2) / 20) ** 0.5
    found = [spread_of(drawn(rng, 3, 20, 2).tolist()).measured for _ in range(200)]
    # 190 of 200; fewer than 180 or more than 199 come once in a thousand times
    assert 180 <= sum((own.low or 0) <= truth <= (own.high or 0) for own in found) <= 199


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_a_detectable_difference_is_found_in_four_of_five_comparisons(seeds: int) -> None:
    rng, deviation = np.random.default_rng(2), 0.03
    difference = detectable(deviation, seeds)
    one, two = rng.normal(0, deviation, (seeds, 4000)), rng.normal(difference, deviation, (seeds, 4000))
    assert (ttest_ind(one, two).pvalue < 0.05).mean() == pytest.approx(0.8, abs=0.02)
    assert chance(1e-3, seeds) == pytest.approx(0.05, abs=1e-5)
    assert seeds_for(difference * 1.001, deviation) == seeds


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_the_fewest_pictures_that_find_a_difference(seeds: int) -> None:
    known: dict[str, float] = {"seed": 4e-4, "prompt": 0.01, "picture": 0.09}
    spread = Spread(runs=3, prompts=60, pictures=4, measured=Interval(0.03, 0.01, 0.1), **known)
    most = detectable(spread.deviation(60, 10**9), seeds)
    count = pictures_for(1.2 * most, seeds, spread)
    assert count is not None and 1 < count < math.inf
    assert detectable(spread.deviation(60, int(count)), seeds) <= 1.2 * most * (1 + 1e-9)
    assert detectable(spread.deviation(60, int(count) - 1), seeds) > 1.2 * most
    # below what the seeds themselves differ by, no number is enough
    assert (
        pictures_for(0.9 * most, seeds, spread) == math.inf and pictures_for(1.2 * most, seeds, spread, 2) == math.inf
    )
    assert pictures_for(10.0, seeds, spread) == 1
    assert pictures_for(0.1, seeds, replace(spread, pictures=1)) is None


def test_what_cannot_be_found_within_reason_is_none() -> None:
    assert seeds_for(0.0001, 1.0) is None and detectable(0.0, 3) == 0
    with pytest.raises(ConfigError, match="two runs or more"):
        spread_of([[[0.1], [0.2]]])
