"""Scores of the same held-out samples under several weights, side by side with standard errors."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np

from flowalign.evaluation.scores import Evaluated


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts, and how far it may be from the mean over all prompts of the kind."""

    mean: float
    error: float | None
    """standard error; None of a single prompt"""

    def __format__(self, how: str) -> str:
        """'+' shows the sign of a gain."""
        return f"{self.mean:{how}.3f}" + ("" if self.error is None else f" ± {self.error:.3f}")


def estimate(values: Sequence[float], prompts: Sequence[str]) -> Estimate | None:
    """The mean of N samples' values; samples of one prompt are alike, so prompts are what the error counts.

    Args:
        values: NaN where the score does not apply.

    Returns:
        None where it applies to no sample.
    """
    of_prompt: dict[str, list[float]] = {}
    for value, prompt in zip(values, prompts, strict=True):
        if value == value:
            of_prompt.setdefault(prompt, []).append(value)
    if not of_prompt:
        return None
    means = [fmean(own) for own in of_prompt.values()]
    error = stdev(means) / len(means) ** 0.5 if len(means) > 1 else None
    return Estimate(fmean(value for own in of_prompt.values() for value in own), error)


EXACT = 12
"""prompts up to which every pattern of signs is looked at"""


@dataclass(frozen=True)
class Significance:
    """What prompts say of a paired difference; what another training seed would make of it they do not say."""

    low: float
    high: float
    """95% interval by the bootstrap: prompts drawn anew, with their samples"""
    p: float
    """how often a difference at least as large would come of prompts whose differences had random signs"""
    better: float
    """share of the prompts on which it is above 0, a tie counting half"""


def significance(
    values: Sequence[float], prompts: Sequence[str], draws: int = 10_000, seed: int = 0
) -> Significance | None:
    """Whether the mean of N samples' paired differences is one that other prompts would show too.

    Args:
        values: NaN where the score does not apply.

    Returns:
        None of fewer than two prompts.
    """
    of_prompt: dict[str, list[float]] = {}
    for value, prompt in zip(values, prompts, strict=True):
        if value == value:
            of_prompt.setdefault(prompt, []).append(value)
    count = len(of_prompt)
    if count < 2:
        return None
    sums, sizes = np.array([sum(own) for own in of_prompt.values()]), np.array([len(own) for own in of_prompt.values()])
    random = np.random.default_rng(seed)
    drawn = random.integers(0, count, (draws, count))
    low, high = np.quantile(sums[drawn].sum(1) / sizes[drawn].sum(1), (0.025, 0.975)).tolist()
    if count <= EXACT:
        signs = 1 - 2 * (np.arange(2**count)[:, None] >> np.arange(count) & 1)
    else:
        # the signs that were found are one of the patterns
        signs = np.vstack([np.ones(count), random.choice([-1, 1], (draws, count))])
    # rounding must not set equal sums apart
    at_least = abs(signs @ sums) >= abs(sums.sum()) * (1 - 1e-9)
    better = float(((sums > 0) + (sums == 0) / 2).mean())
    return Significance(low, high, float(at_least.mean()), better)


@dataclass(frozen=True)
class Row:
    """One score of some prompts."""

    prompts: str
    """'all', or a category"""
    score: str
    means: list[Estimate | None]
    """of each evaluation"""
    differences: list[Estimate | None]
    """of each but the first to the first, paired: the same prompt and seed"""
    gains: list[list[float]]
    """the samples' own differences"""
    of: list[str]
    """the samples' prompts"""


@dataclass
class Comparison:
    """Evaluations of the same prompts and seeds, by label."""

    results: Mapping[str, Evaluated]

    def rows(self, by: str = "category") -> Iterator[Row]:
        """The reward and its parts over all samples, then over the samples with each value of a metadata key.

        Statistics of pictures are left out.
        """
        scores = [{"reward": result.value, **result.parts} for result in self.results.values()]
        first = next(iter(self.results.values()))
        labels = [str(record[by]) if by in record else None for record in first.metadata]
        for label in ["all", *sorted({name for name in labels if name is not None})]:
            kept = [i for i, name in enumerate(labels) if label in ("all", name)]
            prompts = [first.prompts[i] for i in kept]
            for score in scores[0]:
                if score.startswith("statistics/") or any(score not in own for own in scores):
                    continue
                start, *rest = ([own[score][i] for i in kept] for own in scores)
                gains = [[b - a for a, b in zip(start, values, strict=True)] for values in rest]
                yield Row(
                    label,
                    score,
                    [estimate(values, prompts) for values in (start, *rest)],
                    [estimate(gain, prompts) for gain in gains],
                    gains,
                    prompts,
                )

    def record(self) -> dict[str, Any]:
        """The same as JSON: means and differences by label, prompts and score."""
        first, *others = self.results
        means: dict[str, Any] = {name: {} for name in self.results}
        differences: dict[str, Any] = {name: {} for name in others}
        for row in self.rows():
            columns = [*zip(means.values(), row.means, strict=True)]
            columns += zip(differences.values(), row.differences, strict=True)
            for column, own in columns:
                if own is not None:
                    column.setdefault(row.prompts, {})[row.score] = {"mean": own.mean, "error": own.error}
        prompts = self.results[first].prompts
        return {
            "prompts": len(set(prompts)),
            "samples": len(prompts),
            "means": means,
            "compared_with": first,
            "differences": differences,
        }
