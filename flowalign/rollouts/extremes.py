"""The best and the worst samples of an iteration, kept so that people can look at them."""

from collections.abc import Mapping, Sequence
from typing import Any

from rewards import Scores

COUNT = 4
"""Number of best samples, and of worst ones."""
Look = tuple[Any, dict[str, Any]]
"""A sample, and its prompt, seed and scores by name."""


class Extremes:
    """The samples with the highest and the lowest rewards, of all that were offered.

    Each prompt gives one sample before any gives a second one; else all would be of the easiest or the hardest prompt.
    """

    def __init__(self) -> None:
        self.best: list[Look] = []
        self.worst: list[Look] = []

    def offer(
        self, samples: Sequence[Any], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]], scores: Scores
    ) -> None:
        """Offer N scored samples; those among the extremes so far are kept."""
        parts = {name: values.tolist() for name, values in scores.parts.items()}
        looks = []
        for row, (sample, prompt, record) in enumerate(zip(samples, prompts, metadata, strict=True)):
            named = {"prompt": prompt, "seed": record["seed"], "reward": float(scores.value[row])}
            looks.append((sample, named | {name: values[row] for name, values in parts.items()}))
        self.add(looks, looks)

    def add(self, best: Sequence[Look], worst: Sequence[Look]) -> None:
        """Add candidates for the best and for the worst samples."""
        self.best = _first([*self.best, *best], -1)
        self.worst = _first([*self.worst, *worst], 1)


def _first(looks: Sequence[Look], sign: int) -> list[Look]:
    """The first `COUNT` samples by their rewards times the sign, at first only one for each prompt."""

    def reward(look: Look) -> float:
        return sign * float(look[1]["reward"])

    ordered = sorted(looks, key=reward)
    of_prompt = {id(look): look for look in {look[1]["prompt"]: look for look in reversed(ordered)}.values()}
    others = [look for look in ordered if id(look) not in of_prompt]
    chosen = [*sorted(of_prompt.values(), key=reward), *others][:COUNT]
    return sorted(chosen, key=reward)
