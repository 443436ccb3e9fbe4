"""Where a curve of scores goes: exponential approach to a plateau, with intervals of all that the points leave open.

y(t) = c - (c - a) exp(-t / tau) plus noise. For a given tau it is linear in (a, c); tau is taken from a grid, each
value weighted by its marginal likelihood under flat priors of a, c and log tau. Draws of all four give every interval,
so that a curve that has not bent yet has a plateau with a wide one. That the curve goes on in this form is an
assumption: no collapse is foreseen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from flowalign.errors import ConfigError
from flowalign.evaluation.statistics import SEED, Interval

Array = NDArray[np.float64]
FEWEST = 6
"""Points below which a forecast is not made: three parameters and the noise are estimated."""
DRAWS = 4000
"""Most curves that are drawn."""
TRIES = 20_000
FEWEST_DRAWS = 200
"""Possible curves of the tries below which none is believed."""
GRID = 200
"""Values of tau."""
WIDE = 2.0
"""Width of an interval, in ranges of the points so far, from which on it says nothing."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Draws of the curves that the points allow."""

    start: Array
    """[N] a, the score at iteration 0."""
    plateau: Array
    """[N] c."""
    tau: Array
    """[N] in iterations."""
    noise: Array
    """[N] standard deviation of a point around its curve."""
    reach: float
    """Range of the points so far."""
    most: float
    """Largest score that there is."""

    def at(self, iteration: float) -> Interval:
        """Score that would be measured there: median and 95% interval, with the noise of one point."""
        rng = np.random.default_rng(SEED)
        left = np.exp(-iteration / self.tau)
        curve = self.plateau - (self.plateau - self.start) * left
        return _interval(np.minimum(curve + rng.normal(size=len(curve)) * self.noise, self.most))

    def level(self) -> Interval:
        """The plateau: median and 95% interval."""
        return _interval(self.plateau)

    def reached(self, target: float) -> Interval:
        """Iteration at which the curve itself passes a score; an end of infinity: perhaps never."""
        with np.errstate(divide="ignore", invalid="ignore"):
            share = (self.plateau - target) / (self.plateau - self.start)
            iteration = np.where((share > 0) & (share < 1), -self.tau * np.log(share), np.inf)
        iteration = np.where((self.start >= target) & (self.plateau >= target), 0.0, iteration)
        return _interval(iteration)

    def tells(self, interval: Interval) -> bool:
        """Whether an interval of scores is narrow enough to say something."""
        assert interval.low is not None and interval.high is not None
        return interval.high - interval.low < WIDE * self.reach


def forecast(iterations: Sequence[float], scores: Sequence[float], most: float = np.inf) -> Forecast | None:
    """Fit the curve; None where there are fewer than `FEWEST` points, or all are one.

    Args:
        iterations: increasing, of each score.
        most: largest score that there is.

    Raises:
        ConfigError: the curve is above `most`.
    """
    t, y = np.array(iterations, dtype=np.float64), np.array(scores, dtype=np.float64)
    if len(t) < FEWEST or np.ptp(y) == 0:
        return None
    span, count = t[-1] - t[0], len(t)
    taus = np.geomspace(np.diff(t).min() / 2, 4 * span, GRID)
    likelihood, means, roots, residuals = [], [], [], []
    for tau in taus:
        left = np.exp(-t / tau)
        design = np.stack([left, 1 - left], axis=1)
        inverse = np.linalg.inv(design.T @ design)
        mean = inverse @ design.T @ y
        squares = float(((y - design @ mean) ** 2).sum())
        means.append(mean)
        roots.append(np.linalg.cholesky(inverse))
        residuals.append(squares)
        likelihood.append(np.linalg.slogdet(inverse)[1] / 2 - (count - 3) / 2 * np.log(squares))
    rng = np.random.default_rng(SEED)
    weights = np.exp(np.array(likelihood) - logsumexp(likelihood))
    chosen = rng.choice(GRID, size=TRIES, p=weights / weights.sum())
    # a degree of freedom for each of a, c and tau
    noise = np.sqrt(np.array(residuals)[chosen] / rng.chisquare(count - 3, size=TRIES))
    errors = np.einsum("nij,nj->ni", np.stack(roots)[chosen], rng.normal(size=(TRIES, 2)))
    ends = np.stack(means)[chosen] + noise[:, None] * errors
    possible = np.flatnonzero(ends[:, 1] <= most)[:DRAWS]
    if len(possible) < FEWEST_DRAWS:
        raise ConfigError(f"the scores go to {y.max():.3g}, above the largest one of {most:g} that was given")
    start, plateau = ends[possible].T
    return Forecast(
        start=start,
        plateau=plateau,
        tau=taus[chosen[possible]],
        noise=noise[possible],
        reach=float(np.ptp(y)),
        most=most,
    )


def _interval(draws: Array) -> Interval:
    # infinities are whole draws: no interpolation between them and numbers
    low, middle, high = np.quantile(draws, (0.025, 0.5, 0.975), method="nearest").tolist()
    return Interval(middle, low, high)


def curve_of(records: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Iterations and values of a metric, where it is there."""
    points = [(int(record["iteration"]), float(record[key])) for record in records if key in record]
    return [iteration for iteration, _ in points], [value for _, value in points]
