"""How large a difference between two recipes a number of seeds and pictures can show.

The scores of one recipe's runs, on the same held-out prompts and start noises, are
y[s, p, n] = a[s] + b[p, n] + c[s, p] + e[s, p, n]: of training seed s, prompt p and start noise n. Of a difference b is
no part, since it is the same for all, and what two groups of S runs differ by has the variance
2 / S * (var(a) + (var(c) + var(e) / N) / P). Its test is Student's for two groups, with 2 S - 2 degrees of freedom.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import chi2, f, ncf

from flowalign.errors import ConfigError
from flowalign.evaluation.statistics import Interval

LEVEL = 0.05
"""Chance of a difference that is none (two-sided)."""
POWER = 0.8
"""Chance that a true difference is found."""
MOST = 200
"""Largest number of seeds that is looked at."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Variances of one recipe's held-out scores, from S runs of other seeds."""

    runs: int
    prompts: int
    pictures: int
    """Pictures a prompt."""
    seed: float
    """var(a): of the mean over endless pictures of these prompts; 0 where the estimate is below it."""
    prompt: float
    """var(c): of a prompt's own mean from seed to seed, with `picture` where there is one picture a prompt."""
    picture: float
    """var(e): of one picture from seed to seed; 0 where there is one picture a prompt."""
    measured: Interval
    """Standard deviation of the runs' means as they were evaluated, with its 95% interval by the chi-squared law."""

    def deviation(self, prompts: int, pictures: int) -> float:
        """Standard deviation of a run's mean over so many prompts and pictures."""
        return float((self.seed + (self.prompt + self.picture / pictures) / prompts) ** 0.5)

    def record(self) -> dict[str, Any]:
        """The figures as JSON."""
        return vars(self) | {"measured": vars(self.measured)}


def spread_of(scores: Sequence[Sequence[Sequence[float]]]) -> Spread:
    """Variances by mean squares.

    Args:
        scores: [runs, prompts, pictures] of runs that differ in the seed alone.

    Raises:
        ConfigError: fewer than two runs or prompts.
    """
    table: NDArray[np.float64] = np.array(scores, dtype=np.float64)
    runs, prompts, pictures = table.shape
    if min(runs, prompts) < 2:
        raise ConfigError("the spread of seeds needs two runs or more, and two prompts or more")
    means = table.mean(axis=2)
    by_run = means.mean(axis=1)
    inner = means - by_run[:, None] - means.mean(axis=0) + means.mean()
    cell = float((inner**2).sum() / ((runs - 1) * (prompts - 1)))
    picture = 0.0
    if pictures > 1:
        left = table - means[:, :, None] - table.mean(axis=0) + means.mean(axis=0)[:, None]
        picture = float((left**2).sum() / ((runs - 1) * prompts * (pictures - 1)))
    total = float(by_run.var(ddof=1))
    ends = ((runs - 1) * total / chi2.ppf((0.975, 0.025), runs - 1)) ** 0.5
    return Spread(
        runs=runs,
        prompts=prompts,
        pictures=pictures,
        seed=max(total - cell / prompts, 0.0),
        prompt=max(cell - picture / pictures, 0.0),
        picture=picture,
        measured=Interval(total**0.5, float(ends[0]), float(ends[1])),
    )


def chance(shift: float, seeds: int) -> float:
    """Chance that Student's test of two recipes, of so many seeds each, finds their difference.

    Args:
        shift: above 0: the difference over its standard deviation, the noncentrality of the test.
    """
    freedom = 2 * seeds - 2
    # its square has a noncentral F distribution
    return float(ncf.sf(f.isf(LEVEL, 1, freedom), 1, freedom, shift**2))


def detectable(deviation: float, seeds: int) -> float:
    """The difference that so many seeds of each recipe find with the chance POWER.

    Args:
        deviation: standard deviation of a run's mean from seed to seed.
    """
    shift = brentq(lambda size: chance(size, seeds) - POWER, 0.1, 10.0)
    return float(shift) * deviation * (2 / seeds) ** 0.5


def seeds_for(difference: float, deviation: float) -> int | None:
    """The fewest seeds of each recipe that find a difference with the chance POWER; None above MOST."""
    return next((seeds for seeds in range(2, MOST + 1) if detectable(deviation, seeds) <= difference), None)


def pictures_for(difference: float, seeds: int, found: Spread, scale: float = 1.0) -> float | None:
    """The fewest pictures a prompt by which so many seeds of each recipe find a difference with the chance POWER.

    Args:
        scale: factor of all standard deviations, for the ends of the interval.

    Returns:
        infinity where no number of pictures is enough; None where a prompt had one picture, so that nobody knows.
    """
    if found.pictures == 1:
        return None
    # variance of a run's mean at which the difference is found
    allowed = (difference / detectable(1.0, seeds) / scale) ** 2
    left = allowed - found.seed - found.prompt / found.prompts
    return math.ceil(found.picture / found.prompts / left - 1e-9) or 1 if left > 0 else math.inf
