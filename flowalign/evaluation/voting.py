"""Votes as data: the pair to ask about next, agreement between raters, and how many more votes are needed.

The next pair is the one that the present votes leave most open under Bradley and Terry's model: the log-odds that
people choose one sample over another are the difference of the two samples' utilities. A utility is a linear function
of features, such as the scores that a run saved, plus a part that each sample has to itself. Both have a normal prior,
and the posterior is Laplace's (Rasmussen and Williams, 2006, algorithms 3.1 and 3.2).
"""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.special import expit
from scipy.stats import binom

from flowalign.data.votes import WORTH
from flowalign.evaluation.statistics import Interval, redrawn

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
PRIOR = 4.0
"""Variance of a typical pair's log-odds before any vote."""
SINGLE = 0.25
"""Share of it that is due to the part that each sample has to itself."""
Z = 1.959963984540054
"""The normal law's quantile of 97.5%."""
STEPS = 50
"""Most steps of Newton's method; ten are many."""


class BradleyTerry:
    """Log-odds of the second sample of pairs, by the votes so far.

    Args:
        features: [samples, F]; F may be 0.
        first, second: [pairs] rows of each pair's samples.
    """

    def __init__(self, features: Array, first: Indices, second: Indices) -> None:
        differences = features[second] - features[first]
        size = np.sqrt((differences**2).mean(0))
        self.linear = differences[:, size > 0] / size[size > 0]
        count = self.linear.shape[1]
        single = SINGLE if count else 1.0
        self.linear *= math.sqrt(PRIOR * (1 - single) / max(count, 1))
        self.single, self.first, self.second = PRIOR * single / 2, first, second
        self.votes, self.root = np.zeros(0, np.intp), np.zeros(0)
        self.residuals = np.zeros(0)

    def covariance(self, rows: Indices, columns: Indices) -> Array:
        """Prior covariance [rows, columns] of two sets of pairs."""
        one, other = (self.first[rows, None], self.second[rows, None]), (self.first[columns], self.second[columns])
        shared = sum((a == b) * (1.0 if i == j else -1.0) for i, a in enumerate(one) for j, b in enumerate(other))
        return self.linear[rows] @ self.linear[columns].T + self.single * np.asarray(shared)

    def fit(self, votes: Indices, worth: Array) -> None:
        """Find the most probable log-odds.

        Args:
            votes: [N] the pair of each vote; a pair may have several.
            worth: [N] 1 where the second sample was chosen, 0 the first, 0.5 a tie.
        """
        prior, logit = self.covariance(votes, votes), np.zeros(len(votes))
        for _ in range(STEPS):
            chance = expit(logit)
            root = np.sqrt(chance * (1 - chance))
            target = root**2 * logit + worth - chance
            factor = cho_factor(np.eye(len(votes)) + root[:, None] * prior * root)
            before, logit = logit, prior @ (target - root * cho_solve(factor, root * (prior @ target)))
            if np.abs(logit - before).max(initial=0) < 1e-6:
                break
        self.votes, self.root, self.residuals = votes, np.sqrt(expit(logit) * expit(-logit)), worth - expit(logit)

    def predict(self, pairs: Indices) -> tuple[Array, Array]:
        """Mean and variance [pairs] of the log-odds."""
        shared = self.covariance(pairs, self.votes) * self.root
        prior = (self.linear[pairs] ** 2).sum(1) + 2 * self.single
        mean = self.covariance(pairs, self.votes) @ self.residuals
        if not len(self.votes):
            return mean, prior
        inside = np.eye(len(self.votes)) + self.root[:, None] * self.covariance(self.votes, self.votes) * self.root
        return mean, prior - (shared * cho_solve(cho_factor(inside), shared.T).T).sum(1)

    def openness(self, pairs: Indices) -> Array:
        """[pairs] what a vote would teach: the variance of its log-odds times that of its outcome.

        A pair whose outcome is sure, or whose samples differ in nothing that is still unknown, teaches little.
        """
        mean, variance = self.predict(pairs)
        teaches: Array = variance * expit(mean) * expit(-mean)
        return teaches


def wilson(successes: float, trials: int) -> tuple[float, float]:
    """The 95% score interval of a proportion (Wilson 1927); (0, 1) without trials. Half successes are ties."""
    if trials == 0:
        return 0.0, 1.0
    z2 = Z**2
    share = successes / trials
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = math.sqrt(z2 * (share * (1 - share) / trials + z2 / (4 * trials**2))) / (1 + z2 / trials)
    return max(0.0, centre - half), min(1.0, centre + half)


SLIPS = 0.05
"""Share of wrong answers that an attentive rater is allowed where the answer is known."""


def fails(right: int, pairs: int) -> bool:
    """Whether so many wrong answers on pairs with a known one would come from an attentive rater in under 2.5%."""
    return float(binom.sf(pairs - right - 1, pairs, SLIPS)) < 0.025


def alpha(verdicts: Mapping[str, Mapping[str, str]]) -> tuple[Interval | None, int]:
    """Krippendorff's alpha of all raters on nominal verdicts, over the pairs that two or more judged.

    1 is full agreement, 0 that of chance. The interval draws pairs with replacement.

    Args:
        verdicts: {rater: {pair: verdict}}; skipped pairs do not count.

    Returns:
        alpha, None where all verdicts are the same, and the number of pairs.
    """
    kinds = {verdict: i for i, verdict in enumerate(WORTH)}
    given: dict[str, list[int]] = {}
    for votes in verdicts.values():
        for pair, verdict in votes.items():
            if verdict in kinds:
                given.setdefault(pair, []).append(kinds[verdict])
    # [pairs, kinds]
    counts = np.array([np.bincount(votes, minlength=len(kinds)) for votes in given.values() if len(votes) > 1])
    if not len(counts) or (counts.sum(0) > 0).sum() < 2:
        return None, len(counts)
    raters = counts.sum(1)
    apart = (raters**2 - (counts**2).sum(1)) / (raters - 1)

    def values(draws: Array) -> Array:
        totals = draws @ counts
        number = totals.sum(1)
        expected = number**2 - (totals**2).sum(1)
        ratio = np.divide((number - 1) * (draws @ apart), expected, out=np.zeros(len(draws)), where=expected > 0)
        return np.asarray(1 - ratio)

    mean = float(values(np.ones((1, len(counts))))[0])
    if len(counts) < 2:
        return Interval(mean), len(counts)
    low, high = np.quantile(values(redrawn(len(counts))), (0.025, 0.975)).tolist()
    return Interval(mean, low, high), len(counts)


def more_needed(successes: float, trials: int) -> tuple[int, int | None] | None:
    """Further votes until the interval of a win rate leaves out one half.

    Returns:
        None where it does already; otherwise the fewest, if the rate is the end of its present interval that is further
        from one half, and the number if the rate stays as it is, which is None at one half.
    """
    low, high = wilson(successes, trials)
    if low > 0.5 or high < 0.5:
        return None
    further, rate = max(low, high, key=lambda end: abs(end - 0.5)), successes / trials if trials else 0.5
    # the score test of one half: |rate - 1/2| > z / (2 sqrt(n))
    fewest, staying = (math.inf if r == 0.5 else (Z / (2 * (r - 0.5))) ** 2 for r in (further, rate))
    return max(1, math.floor(fewest) + 1 - trials), None if rate == 0.5 else math.floor(staying) + 1 - trials
