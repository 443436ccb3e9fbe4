"""Statistics of scores: errors, intervals and ranks. Their unit is the prompt, since samples of one prompt are alike.

Intervals are 95% bootstrap intervals: prompts are drawn with replacement, each with all its samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest, permutation_test

RESAMPLES = 2000
SEED = 0
"""Seed of all draws, so that the same scores give the same intervals."""
SIGNS = 10_000
"""Largest number of sign patterns that a test draws; it takes all of them if there are fewer."""
OVERALL = "overall"
Scored = Sequence[Sequence[Mapping[str, float | list[float]]]]
"""The scores by name of each sample, of each prompt."""


def by_prompt(values: Sequence[float], prompts: Sequence[str]) -> list[list[float]]:
    """Group samples' values by prompt, without NaN, which marks a sample that the score does not apply to."""
    samples: dict[str, list[float]] = {}
    for value, prompt in zip(values, prompts, strict=True):
        if value == value:
            samples.setdefault(prompt, []).append(value)
    return list(samples.values())


def redrawn(prompts: int) -> NDArray[np.float64]:
    """Counts [RESAMPLES, prompts]: how often each prompt is drawn when as many are drawn with replacement."""
    draws = np.random.default_rng(SEED).multinomial(prompts, np.full(prompts, 1 / prompts), size=RESAMPLES)
    return draws.astype(np.float64)


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts and its standard error, which is due to the choice of the prompts."""

    mean: float
    error: float | None
    """Standard error; None of a single prompt."""

    def __format__(self, how: str) -> str:
        """'+' shows the sign of a gain."""
        return f"{self.mean:{how}.3f}" + ("" if self.error is None else f" ± {self.error:.3f}")


def estimate(values: Sequence[float], prompts: Sequence[str]) -> Estimate | None:
    """The mean of N samples' values; None where the score applies to no sample."""
    grouped = by_prompt(values, prompts)
    if not grouped:
        return None
    means = [fmean(samples) for samples in grouped]
    error = stdev(means) / len(means) ** 0.5 if len(means) > 1 else None
    return Estimate(fmean(value for samples in grouped for value in samples), error)


def share_interval(share: float, count: int) -> tuple[float, float]:
    """The exact 95% interval of a share of independent trials (Clopper and Pearson)."""
    interval = binomtest(round(share * count), count).proportion_ci()
    return float(interval.low), float(interval.high)


@dataclass(frozen=True, kw_only=True)
class Significance:
    """Significance of a paired difference over prompts; it says nothing about other training seeds."""

    low: float
    high: float
    """Upper end of the 95% interval, as `low` is the lower one."""
    p: float
    """Chance of so large a difference if every prompt's difference had a random sign."""
    better: float
    """Share of the prompts on which the difference is above 0, a tie counting half."""


def significance(values: Sequence[float], prompts: Sequence[str]) -> Significance | None:
    """Test if the mean of N paired differences would also show on other prompts; None with fewer than two prompts."""
    grouped = by_prompt(values, prompts)
    if len(grouped) < 2:
        return None
    sums, sizes = np.array([sum(samples) for samples in grouped]), np.array([len(samples) for samples in grouped])
    draws = redrawn(len(grouped))
    low, high = np.quantile(draws @ sums / (draws @ sizes), (0.025, 0.975)).tolist()
    signs = permutation_test(
        (sums,),
        lambda flipped, axis: abs(flipped.sum(axis)),
        permutation_type="samples",
        alternative="greater",
        n_resamples=SIGNS,
        vectorized=True,
        random_state=SEED,
    )
    better = float(((sums > 0) + (sums == 0) / 2).mean())
    return Significance(low=low, high=high, p=float(signs.pvalue), better=better)


def ranks(scores: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, tuple[int, int]]:
    """The 95% interval of each algorithm's rank, from draws of the same prompts for all and of seeds for each.

    Args:
        scores: by algorithm, [seeds, prompts].
    """
    rng = np.random.default_rng(SEED + 1)
    tables = {name: np.array(rows) for name, rows in scores.items()}
    drawn = []
    for draw in redrawn(next(iter(tables.values())).shape[1]):
        drawn.append([table[rng.integers(len(table), size=len(table))].mean(0) @ draw for table in tables.values()])
    means = np.array(drawn)
    # ties share the better rank; sums in another order differ by rounding
    ranked = 1 + (means[:, None, :] > means[:, :, None] + 1e-9).sum(axis=-1)
    low, high = np.percentile(ranked, [2.5, 97.5], axis=0, method="nearest").astype(int).tolist()
    return {name: (low[i], high[i]) for i, name in enumerate(tables)}


@dataclass(frozen=True)
class Interval:
    """A mean and its 95% interval; a single prompt has none."""

    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def ends(self) -> tuple[float, float]:
        """The interval's ends; without an interval the mean twice."""
        return (self.mean, self.mean) if self.low is None or self.high is None else (self.low, self.high)

    def __format__(self, how: str) -> str:
        """'+' shows the sign of a gain."""
        ends = "" if self.low is None else f" [{self.low:{how}.3f}, {self.high:{how}.3f}]"
        return f"{self.mean:{how}.3f}{ends}"


def ratio(above: Sequence[float], below: Sequence[float] | None = None) -> Interval:
    """The ratio of two sums over prompts, and its 95% interval; without `below` the mean of prompts.

    Args:
        above: numerator of each prompt.
        below: denominator of each prompt, at least one of them above 0; a draw of prompts whose denominators are all 0
            is left out.
    """
    tops = np.asarray(above, dtype=np.float64)
    bottoms = np.ones_like(tops) if below is None else np.asarray(below, dtype=np.float64)
    mean = float(tops.sum() / bottoms.sum())
    if len(tops) < 2:
        return Interval(mean)
    draws = redrawn(len(tops))
    drawn = draws @ bottoms
    low, high = np.quantile((draws @ tops)[drawn > 0] / drawn[drawn > 0], (0.025, 0.975)).tolist()
    return Interval(mean, low, high)


def means(scores: Scored, headline: Sequence[str]) -> dict[str, Interval]:
    """The mean of each score and of the headline, by name.

    Args:
        headline: names whose means are averaged to 'overall'; names that no sample has are left out.
    """
    names = names_of(scores, headline)
    once, often = (_means(scores, names, headline, draws) for draws in _draws(len(scores)))
    return _intervals(names, once, often)


def differences(base: Scored, other: Scored, headline: Sequence[str]) -> dict[str, Interval]:
    """Differences of the means of `other` to those of `base`, both on the same prompts and the same draws of them."""
    names = names_of(base, headline)
    once, often = (
        _means(other, names, headline, draws) - _means(base, names, headline, draws) for draws in _draws(len(base))
    )
    return _intervals(names, once, often)


def names_of(scores: Scored, headline: Sequence[str]) -> list[str]:
    """The names of all scores, the headline's first."""
    names = dict.fromkeys(name for samples in scores for sample in samples for name in sample)
    return [*(name for name in headline if name in names), *(name for name in names if name not in headline)]


def _draws(prompts: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Counts of the prompts: [1, prompts] of ones for the mean itself, and the draws of `redrawn`."""
    return np.ones((1, prompts)), redrawn(prompts)


def _means(
    scores: Scored, names: Sequence[str], headline: Sequence[str], draws: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Means [draws, names + 1] of each name in each draw, the headline first; NaN where a draw has no value."""
    sums, numbers = np.zeros((len(scores), len(names))), np.zeros((len(scores), len(names)))
    column = {name: i for i, name in enumerate(names)}
    for row, samples in enumerate(scores):
        for sample in samples:
            for name, value in sample.items():
                values = value if isinstance(value, list) else [value]
                sums[row, column[name]] += sum(values)
                numbers[row, column[name]] += len(values)
    drawn = draws @ numbers
    averages = np.divide(draws @ sums, drawn, out=np.full(drawn.shape, np.nan), where=drawn > 0)
    in_headline = averages[:, [column[name] for name in headline if name in column]]
    return np.column_stack([np.nanmean(in_headline, axis=1), averages])


def _intervals(names: Sequence[str], once: NDArray[np.float64], often: NDArray[np.float64]) -> dict[str, Interval]:
    low, high = np.nanpercentile(often, [2.5, 97.5], axis=0).tolist()
    alone = bool((often == often[0]).all()) and len(often) > 1 and np.array_equal(often[0], once[0])
    return {
        name: Interval(mean) if alone else Interval(mean, low[i], high[i])
        for i, (name, mean) in enumerate(zip([OVERALL, *names], once[0].tolist(), strict=True))
    }


def as_record(intervals: Mapping[str, Interval]) -> dict[str, dict[str, float | None]]:
    """The intervals as JSON."""
    return {name: vars(interval) for name, interval in intervals.items()}
