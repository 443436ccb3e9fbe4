"""The distance of pictures beside a literal one, and its interval."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from flowalign.evaluation.diversity import diversity
from flowalign.evaluation.scores import Evaluated
from flowalign.evaluation.statistics import Interval, ratio


def test_diversity_is_the_distance_of_pictures_of_one_prompt() -> None:
    def flat(level: int) -> Image.Image:
        return Image.fromarray(np.full((4, 4, 3), level, np.uint8))

    pictures = [flat(0), flat(51), flat(0), flat(0)]
    result = Evaluated(
        prompts=["a", "a", "b", "b"],
        metadata=[{}] * 4,
        seeds=[0] * 4,
        value=[0.0] * 4,
        parts={},
        samples=pictures,
        rows=[0, 1, 2, 3],
    )
    # 0.2 apart, and not at all
    found = diversity(result)
    assert (found.mean, *found.ends) == pytest.approx((0.1, 0.0, 0.2))
    assert diversity(replace(result, prompts=["a", "b", "c", "d"])) == Interval(0.0)


def test_95_of_100_intervals_of_a_ratio_hold_the_true_one() -> None:
    """40 prompts a time: a numerator is twice its denominator plus noise, and the ratio of the expectations is 2."""
    rng = np.random.default_rng(0)
    held = alone = 0
    for _ in range(400):
        below = rng.gamma(4.0, 0.25, 40)
        found = ratio((2 * below + rng.normal(0, 0.5, 40)).tolist(), below.tolist())
        mean = ratio(below.tolist())
        held += found.ends[0] <= 2 <= found.ends[1]
        alone += mean.ends[0] <= 1 <= mean.ends[1]
    # percentile intervals of 40 are a little narrow; the standard error of a share of 400 is 0.011
    assert 0.91 <= held / 400 <= 0.98 and 0.91 <= alone / 400 <= 0.98
    assert ratio([1.0], [2.0]) == Interval(0.5)
    # draws without a denominator are left out
    assert ratio([1.0, 1.0], [0.0, 1.0]) == Interval(2.0, 1.0, 2.0)
