"""What scores say beyond the samples at hand: errors, intervals and ranks, which count prompts and not samples.

Samples of one prompt are alike. Intervals are 95% of the bootstrap: prompts drawn with replacement, with their samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
from numpy.typing import NDArray
from scipy.stats import permutation_test

RESAMPLES = 2000
SEED = 0
"""Seed of all draws, so that the same scores give the same intervals."""
SIGNS = 10_000
"""Patterns of signs that a test draws where there are more of them."""
OVERALL = "overall"
Scored = Sequence[Sequence[Mapping[str, float | list[float]]]]
"""The scores by name of each sample, of each prompt."""


def by_prompt(values: Sequence[float], prompts: Sequence[str]) -> list[list[float]]:
    """The values of each prompt's samples, without NaN, which marks a sample that a score does not apply to."""
    samples: dict[str, list[float]] = {}
    for value, prompt in zip(values, prompts, strict=True):
        if value == value:
            samples.setdefault(prompt, []).append(value)
    return list(samples.values())


def redrawn(prompts: int) -> NDArray[np.float64]:
    """[RESAMPLES, prompts] how often each prompt counts when as many are drawn with replacement."""
    draws = np.random.default_rng(SEED).multinomial(prompts, np.full(prompts, 1 / prompts), size=RESAMPLES)
    return draws.astype(np.float64)


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts, and how far it may be from the mean over all prompts of the kind."""

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


@dataclass(frozen=True, kw_only=True)
class Significance:
    """What prompts say of a paired difference; what another training seed would make of it they do not say."""

    low: float
    high: float
    """Upper end of the 95% interval, as `low` is the lower one."""
    p: float
    """Chance of so large a difference if every prompt's difference had a random sign."""
    better: float
    """Share of the prompts on which the difference is above 0, a tie counting half."""


def significance(values: Sequence[float], prompts: Sequence[str]) -> Significance | None:
    """Whether the mean of N samples' paired differences would show on other prompts; None of fewer than two."""
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
    """The 95% interval of each algorithm's rank: prompts are drawn with replacement for all, and seeds for each.

    Args:
        scores: of each algorithm, a row a seed, a column a prompt.
    """
    rng = np.random.default_rng(SEED + 1)
    tables = {name: np.array(rows) for name, rows in scores.items()}
    drawn = []
    for draw in redrawn(next(iter(tables.values())).shape[1]):
        drawn.append([table[rng.integers(len(table), size=len(table))].mean(0) @ draw for table in tables.values()])
    means = np.array(drawn)
    # ties share the better rank; sums in another order differ by rounding
    places = 1 + (means[:, None, :] > means[:, :, None] + 1e-9).sum(axis=-1)
    low, high = np.percentile(places, [2.5, 97.5], axis=0, method="nearest").astype(int).tolist()
    return {name: (low[i], high[i]) for i, name in enumerate(tables)}


@dataclass(frozen=True)
class Interval:
    """A mean and its 95% interval; a single prompt has none."""

    mean: float
    low: float | None = None
    high: float | None = None

    def __format__(self, how: str) -> str:
        """'+' shows the sign of a gain."""
        ends = "" if self.low is None else f" [{self.low:{how}.3f}, {self.high:{how}.3f}]"
        return f"{self.mean:{how}.3f}{ends}"


def means(scores: Scored, headline: Sequence[str]) -> dict[str, Interval]:
    """The mean of each score and of the headline, by name.

    Args:
        headline: names whose means are averaged to 'overall'; those that no sample has are passed over.
    """
    names = names_of(scores, headline)
    once, often = (_means(scores, names, headline, draws) for draws in _draws(len(scores)))
    return _intervals(names, once, often)


def differences(base: Scored, other: Scored, headline: Sequence[str]) -> dict[str, Interval]:
    """How much higher the means of other samples of the same prompts are; both are drawn together."""
    names = names_of(base, headline)
    once, often = (
        _means(other, names, headline, draws) - _means(base, names, headline, draws) for draws in _draws(len(base))
    )
    return _intervals(names, once, often)


def names_of(scores: Scored, headline: Sequence[str]) -> list[str]:
    """The names of all scores, the headline's first."""
    there = dict.fromkeys(name for samples in scores for sample in samples for name in sample)
    return [*(name for name in headline if name in there), *(name for name in there if name not in headline)]


def _draws(prompts: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """How often each prompt counts: [1, prompts] as it is, and in the draws."""
    return np.ones((1, prompts)), redrawn(prompts)


def _means(
    scores: Scored, names: Sequence[str], headline: Sequence[str], draws: NDArray[np.float64]
) -> NDArray[np.float64]:
    """[draws, names + 1] means over what each name has in each draw, the headline first; NaN where it has nothing."""
    sums, numbers = np.zeros((len(scores), len(names))), np.zeros((len(scores), len(names)))
    column = {name: i for i, name in enumerate(names)}
    for row, samples in enumerate(scores):
        for sample in samples:
            for name, value in sample.items():
                values = value if isinstance(value, list) else [value]
                sums[row, column[name]] += sum(values)
                numbers[row, column[name]] += len(values)
    drawn = draws @ numbers
    own = np.divide(draws @ sums, drawn, out=np.full(drawn.shape, np.nan), where=drawn > 0)
    averaged = own[:, [column[name] for name in headline if name in column]]
    return np.column_stack([np.nanmean(averaged, axis=1), own])


def _intervals(names: Sequence[str], once: NDArray[np.float64], often: NDArray[np.float64]) -> dict[str, Interval]:
    low, high = np.nanpercentile(often, [2.5, 97.5], axis=0).tolist()
    alone = bool((often == often[0]).all()) and len(often) > 1 and np.array_equal(often[0], once[0])
    return {
        name: Interval(mean) if alone else Interval(mean, low[i], high[i])
        for i, (name, mean) in enumerate(zip([OVERALL, *names], once[0].tolist(), strict=True))
    }


def as_record(intervals: Mapping[str, Interval]) -> dict[str, dict[str, float | None]]:
    """The same as JSON."""
    return {name: vars(interval) for name, interval in intervals.items()}
