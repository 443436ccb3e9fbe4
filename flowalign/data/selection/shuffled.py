"""Every prompt in turn."""

from collections.abc import Sequence
from typing import Any

from flowalign.data import Prompts
from flowalign.data.batches import ordered


class Shuffled:
    """Every prompt in turn, in a seeded order that is new each time the list is used up.

    Where prompts ask for pictures of several sizes, an iteration has one of them.
    """

    name = "shuffled"

    def __init__(self) -> None:
        self.drawn = 0

    def picks(self, prompts: Prompts, iteration: int, groups: int, seed: int, round: int = 0) -> list[int]:
        first, self.drawn = self.drawn, self.drawn + groups
        return ordered(prompts, first, groups, seed)

    def learn(self, picks: Sequence[int], prompts: Prompts, success: Sequence[float], gain: Sequence[float]) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]
