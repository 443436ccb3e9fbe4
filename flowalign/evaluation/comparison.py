"""Scores of the same held-out samples under several weights, side by side with standard errors."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flowalign.evaluation.scores import Evaluated
from flowalign.evaluation.statistics import Estimate, estimate


@dataclass(frozen=True, kw_only=True)
class Row:
    """One score of some prompts."""

    prompts: str
    """Category of the prompts, or 'all'."""
    score: str
    means: list[Estimate | None]
    """Mean of the score in each evaluation."""
    differences: list[Estimate | None]
    """Difference of each later evaluation to the first, paired: the same prompt and seed."""
    gains: list[list[float]]
    """Difference of each sample."""
    of: list[str]
    """Prompt of each sample."""


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
            selected = [i for i, name in enumerate(labels) if label in ("all", name)]
            prompts = [first.prompts[i] for i in selected]
            for score in scores[0]:
                if score.startswith("statistics/") or any(score not in columns for columns in scores):
                    continue
                base, *others = ([columns[score][i] for i in selected] for columns in scores)
                gains = [[b - a for a, b in zip(base, values, strict=True)] for values in others]
                yield Row(
                    prompts=label,
                    score=score,
                    means=[estimate(values, prompts) for values in (base, *others)],
                    differences=[estimate(gain, prompts) for gain in gains],
                    gains=gains,
                    of=prompts,
                )

    def record(self) -> dict[str, Any]:
        """The comparison as JSON: means and differences by label, prompts and score."""
        first, *others = self.results
        means: dict[str, Any] = {name: {} for name in self.results}
        differences: dict[str, Any] = {name: {} for name in others}
        for row in self.rows():
            columns = [*zip(means.values(), row.means, strict=True)]
            columns += zip(differences.values(), row.differences, strict=True)
            for column, estimated in columns:
                if estimated is not None:
                    column.setdefault(row.prompts, {})[row.score] = {"mean": estimated.mean, "error": estimated.error}
        prompts = self.results[first].prompts
        return {
            "prompts": len(set(prompts)),
            "samples": len(prompts),
            "means": means,
            "compared_with": first,
            "differences": differences,
        }
