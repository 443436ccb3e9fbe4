"""Categories of prompts that pay, by a bandit."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowalign.data import Prompts


class SEC:
    """SEC: a bandit over the prompts' categories, paid by the size of their advantages (arXiv 2505.14970).

    Q <- rate * gain + (1 - rate) * Q; categories are drawn by softmax(Q / temperature).

    Args:
        key: key of the category in the prompts' metadata.
        rate: learning rate in (0, 1].
        temperature: temperature of the softmax.
    """

    name = "sec"

    def __init__(self, key: str = "category", rate: float = 0.5, temperature: float = 1.0) -> None:
        if not (0 < rate <= 1 and temperature > 0):
            raise ValueError("sec: rate in (0, 1] and temperature above 0")
        self.key, self.rate, self.temperature = key, rate, temperature
        self.value: dict[str, float] = {}

    def picks(self, prompts: Prompts, iteration: int, groups: int, seed: int, round: int = 0) -> list[int]:
        random = np.random.default_rng([seed, iteration, 6, round])
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
