"""Which prompts an iteration trains on; for pictures and texts alike.

A selection picks numbers of prompts, is told how the groups fared, and keeps its state in checkpoints. Every process
makes the same picks and is told of the groups of all.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flowalign.data import Prompts, shuffled


class Selection(Protocol):
    """Picks the prompts of an iteration."""

    def picks(self, prompts: Prompts, iteration: int, groups: int, seed: int) -> list[int]:
        """Numbers of this iteration's prompts, one a group, the same on every process."""

    def learn(self, picks: Sequence[int], prompts: Prompts, success: Sequence[float], gain: Sequence[float]) -> None:
        """Told after an iteration.

        Args:
            picks: as of `picks`.
            success: mean reward of each group.
            gain: mean size of its advantages.
        """

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""


class Shuffled:
    """Every prompt in turn, in a seeded order that is new each time the list is used up."""

    def picks(self, prompts: Prompts, iteration: int, groups: int, seed: int) -> list[int]:
        return shuffled(len(prompts), iteration, groups, seed)

    def learn(self, picks: Sequence[int], prompts: Prompts, success: Sequence[float], gain: Sequence[float]) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


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

    def __init__(self, target: float = 0.5, candidates: int = 4, memory: float = 0.5, members: int = 8) -> None:
        if not (0 <= target <= 1 and 0 < memory <= 1 and candidates >= 1 and members >= 1):
            raise ValueError("mopps: target in [0, 1], memory in (0, 1], candidates and members at least 1")
        self.target, self.candidates, self.memory, self.members = target, candidates, memory, members
        self.evidence: dict[int, tuple[float, float]] = {}
        """successes and failures of each prompt seen, discounted"""

    def picks(self, prompts: Prompts, iteration: int, groups: int, seed: int) -> list[int]:
        random = np.random.default_rng([seed, iteration, 5])
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


class SEC:
    """SEC: a bandit over the prompts' categories, paid by the size of their advantages (arXiv 2505.14970).

    Q <- rate * gain + (1 - rate) * Q; categories are drawn by softmax(Q / temperature).

    Args:
        key: of the category in the prompts' metadata.
        rate: of learning, in (0, 1].
        temperature: of the softmax.
    """

    def __init__(self, key: str = "category", rate: float = 0.5, temperature: float = 1.0) -> None:
        if not (0 < rate <= 1 and temperature > 0):
            raise ValueError("sec: rate in (0, 1] and temperature above 0")
        self.key, self.rate, self.temperature = key, rate, temperature
        self.value: dict[str, float] = {}

    def picks(self, prompts: Prompts, iteration: int, groups: int, seed: int) -> list[int]:
        random = np.random.default_rng([seed, iteration, 6])
        rows = self._rows(prompts)
        names = sorted(rows)
        chosen = random.choice(len(names), groups, p=self.shares(names))
        return [int(random.choice(rows[names[i]])) for i in chosen]

    def shares(self, names: Sequence[str]) -> NDArray[np.float64]:
        """The probability of each category."""
        logits = np.array([self.value.get(name, 0.0) for name in names]) / self.temperature
        weights = np.exp(logits - logits.max())
        return weights / weights.sum()

    def _rows(self, prompts: Prompts) -> dict[str, list[int]]:
        rows: dict[str, list[int]] = {}
        for i, record in enumerate(prompts.metadata):
            rows.setdefault(str(record.get(self.key, "")), []).append(i)
        return rows

    def learn(self, picks: Sequence[int], prompts: Prompts, success: Sequence[float], gain: Sequence[float]) -> None:
        gains: dict[str, list[float]] = {}
        for pick, size in zip(picks, gain, strict=True):
            gains.setdefault(str(prompts.metadata[pick].get(self.key, "")), []).append(size)
        for name, sizes in gains.items():
            self.value[name] = self.rate * sum(sizes) / len(sizes) + (1 - self.rate) * self.value.get(name, 0.0)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = dict(state["value"])
