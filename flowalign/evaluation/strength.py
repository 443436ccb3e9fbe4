"""A LoRA at several strengths: the trained reward, a panel and the diversity, from the base to beyond the run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowalign.data import Prompts
from flowalign.evaluation.diversity import diversity
from flowalign.evaluation.scores import Evaluated, evaluate
from flowalign.evaluation.statistics import Interval, significance
from flowalign.policies.base import Policy
from flowalign.policies.settings import SamplingSettings
from flowalign.runs.show import Grid
from rewards import Reward

STRENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)


@dataclass(frozen=True)
class StrengthCurve:
    """The same held-out samples at several strengths of a LoRA."""

    results: Mapping[float, Evaluated]

    @property
    def best(self) -> float:
        """Strength with the highest mean reward."""
        return max(self.results, key=lambda strength: _mean(self.results[strength].value))

    def as_good(self) -> list[float]:
        """Strengths that the samples cannot tell from the best: p of the paired difference is 0.05 or more."""
        best = self.results[self.best]
        alike = []
        for strength, result in self.results.items():
            gains = [a - b for a, b in zip(best.value, result.value, strict=True)]
            found = significance(gains, result.prompts)
            if found is None or found.p >= 0.05:
                alike.append(strength)
        return alike

    def diversity(self, strength: float) -> Interval:
        """Mean distance of a prompt's pictures, in [0, 1], with its 95% interval over prompts."""
        return diversity(self.results[strength])

    def film(self, prompts: int) -> Grid:
        """The first picture of so many prompts, a row each, from the lowest strength to the highest."""
        first = next(iter(self.results.values()))
        rows = list({prompt: i for i, prompt in reversed(list(enumerate(first.prompts)))}.values())[::-1][:prompts]
        pictures = [[result.samples[row] for result in self.results.values()] for row in rows]
        captions = [[f"{strength:g}" for strength in self.results] for _ in rows]
        for row, texts in zip(rows, captions, strict=True):
            texts[0] += f": {first.prompts[row]}"
        return Grid(pictures, captions)


def strength_curve(
    policy: Policy[Any],
    judge: Reward,
    prompts: Prompts,
    sampling: SamplingSettings,
    per_prompt: int,
    seed: int,
    strengths: Sequence[float] = STRENGTHS,
) -> StrengthCurve:
    """Sample the same prompts and start noises at each strength of the trained LoRA, and score the samples.

    Raises:
        ConfigError: the policy has no LoRA.
    """
    results = {}
    for strength in strengths:
        with policy.strength(strength):
            results[strength] = evaluate(policy, judge, prompts, sampling, per_prompt, seed)
    return StrengthCurve(results)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
