"""Means of scores over prompts, with the intervals of a bootstrap that draws prompts with replacement."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flowalign.evaluation.benchmarks.base import SampleScores

RESAMPLES = 2000
SEED = 0
"""of the draws, so that the same scores give the same intervals"""
OVERALL = "overall"
Scored = Sequence[Sequence[SampleScores]]
"""of each prompt its samples' scores"""


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
    return _intervals(names, *(_means(scores, names, headline, draws) for draws in _draws(len(scores))))


def differences(base: Scored, other: Scored, headline: Sequence[str]) -> dict[str, Interval]:
    """How much higher the means of other samples of the same prompts are; both are drawn together."""
    names = names_of(base, headline)
    gains = [
        _means(other, names, headline, draws) - _means(base, names, headline, draws) for draws in _draws(len(base))
    ]
    return _intervals(names, *gains)


def names_of(scores: Scored, headline: Sequence[str]) -> list[str]:
    """The names of all scores, the headline's first."""
    there = dict.fromkeys(name for samples in scores for sample in samples for name in sample)
    return [*(name for name in headline if name in there), *(name for name in there if name not in headline)]


def _draws(prompts: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """How often each prompt counts: [1, prompts] as it is, and [RESAMPLES, prompts] with replacement."""
    draws = np.random.default_rng(SEED).multinomial(prompts, np.full(prompts, 1 / prompts), size=RESAMPLES)
    return np.ones((1, prompts)), draws.astype(np.float64)


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
