"""Prompts of middling difficulty, by a posterior for each."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from flowalign.data import Prompts


class MoPPS:
    """MoPPS: prompts of middling difficulty, predicted by a Beta posterior for each (arXiv 2507.04632).

    A random set of candidates is drawn; each one's success rate is sampled from its posterior, and those nearest to
    the target are trained on. What was seen long ago counts less.

    Args:
        target: success rate to train at.
        candidates: how many times as many candidates as groups.
        memory: share of the evidence that is kept at each new observation, in (0, 1].
        members: how many observations one group's success rate counts as.
    """

    name = "mopps"

    def __init__(self, target: float = 0.5, candidates: int = 4, memory: float = 0.5, members: int = 8) -> None:
        if not (0 <= target <= 1 and 0 < memory <= 1 and candidates >= 1 and members >= 1):
            raise ValueError("mopps: target in [0, 1], memory in (0, 1], candidates and members at least 1")
        self.target, self.candidates, self.memory, self.members = target, candidates, memory, members
        self.evidence: dict[int, tuple[float, float]] = {}
        """Successes and failures of each prompt seen, discounted."""

    def picks(self, prompts: Prompts, iteration: int, groups: int, seed: int, round: int = 0) -> list[int]:
        random = np.random.default_rng([seed, iteration, 5, round])
        drawn = random.choice(len(prompts), min(len(prompts), groups * self.candidates), replace=False)
        counts = np.array([self.evidence.get(int(i), (0.0, 0.0)) for i in drawn])
        rates = random.beta(1 + counts[:, 0], 1 + counts[:, 1])
        nearest = drawn[np.argsort(np.abs(rates - self.target), kind="stable")]
        # a list shorter than the iteration is gone through again
        return [int(nearest[i % len(nearest)]) for i in range(groups)]

    def learn(self, picks: Sequence[int], prompts: Prompts, success: Sequence[float], gain: Sequence[float]) -> None:
        for pick, rate in zip(picks, success, strict=True):
            right, wrong = self.evidence.get(pick, (0.0, 0.0))
            rate = min(max(rate, 0.0), 1.0)
            self.evidence[pick] = (
                self.memory * right + self.members * rate,
                self.memory * wrong + self.members * (1 - rate),
            )

    def state_dict(self) -> dict[str, Any]:
        return {"evidence": [[pick, *counts] for pick, counts in self.evidence.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.evidence = {int(pick): (right, wrong) for pick, right, wrong in state["evidence"]}
