"""The best and the worst samples of an iteration, kept so that people can look at them."""

from collections.abc import Mapping, Sequence
from typing import Any

from rewards import Scores

COUNT = 4
"""Number of best samples, and of worst ones."""
Look = tuple[Any, dict[str, Any]]
"""A sample, and its prompt, seed and scores by name."""


class Extremes:
    """Of all samples that it is offered, those with the highest and with the lowest rewards.

    A prompt has one of them before another prompt's second: else all would be of the easiest or the hardest one.
    """

    def __init__(self) -> None:
        self.best: list[Look] = []
        self.worst: list[Look] = []

    def offer(
        self, samples: Sequence[Any], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]], scores: Scores
    ) -> None:
        """Keep which of N scored samples are among the extremes so far."""
        parts = {name: values.tolist() for name, values in scores.parts.items()}
        looks = []
        for row, (sample, prompt, record) in enumerate(zip(samples, prompts, metadata, strict=True)):
            named = {"prompt": prompt, "seed": record["seed"], "reward": float(scores.value[row])}
            looks.append((sample, named | {name: values[row] for name, values in parts.items()}))
        self.add(looks, looks)

    def add(self, best: Sequence[Look], worst: Sequence[Look]) -> None:
        """Look at further samples that may be among the best, and further ones that may be among the worst."""
        self.best = _first([*self.best, *best], -1)
        self.worst = _first([*self.worst, *worst], 1)


def _first(looks: Sequence[Look], sign: int) -> list[Look]:
    """Some of the samples in the order of their rewards times the sign."""

    def reward(look: Look) -> float:
        return sign * float(look[1]["reward"])

    ordered = sorted(looks, key=reward)
    of_prompt = {id(look): look for look in {look[1]["prompt"]: look for look in reversed(ordered)}.values()}
    rest = [look for look in ordered if id(look) not in of_prompt]
    kept = [*sorted(of_prompt.values(), key=reward), *rest][:COUNT]
    return sorted(kept, key=reward)
