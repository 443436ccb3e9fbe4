"""Any selection on prompts of several sizes: each iteration has prompts of one."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flowalign.data import Prompts
from flowalign.data.selection.base import Selection
from flowalign.data.sizes import Size, rows_by_size


class BySize:
    """A selection for each size, which picks from the prompts of that size and learns from them alone.

    Iterations go to the sizes in proportion to the numbers of their prompts: a turn has as many iterations of a size as
    its prompts need, the iterations of all sizes in a seeded order.

    Args:
        build: makes a selection.
        prompts: prompts of all sizes.
    """

    def __init__(self, build: Callable[[], Selection], prompts: Prompts) -> None:
        self.rows = rows_by_size(prompts.metadata)
        self.listed = {size: prompts.take(rows) for size, rows in self.rows.items()}
        self.selections = {size: build() for size in self.rows}
        self.row = {row: (size, i) for size, rows in self.rows.items() for i, row in enumerate(rows)}
        self.groups = 0
        """Groups of an iteration; a further round, which draws some of them anew, is of the same size."""

    def size(self, iteration: int, seed: int) -> Size:
        """The size of an iteration's prompts."""
        turn = [size for size, rows in self.rows.items() for _ in range(-(-len(rows) // self.groups))]
        number, position = divmod(iteration, len(turn))
        return turn[int(np.random.default_rng([seed, number, 8]).permutation(len(turn))[position])]

    def picks(self, prompts: Prompts, iteration: int, groups: int, seed: int, round: int = 0) -> list[int]:
        if round == 0:
            self.groups = groups
        size = self.size(iteration, seed)
        picked = self.selections[size].picks(self.listed[size], iteration, groups, seed, round)
        return [self.rows[size][i] for i in picked]

    def learn(self, picks: Sequence[int], prompts: Prompts, success: Sequence[float], gain: Sequence[float]) -> None:
        for size, selection in self.selections.items():
            of_size = [n for n, pick in enumerate(picks) if self.row[pick][0] == size]
            if of_size:
                rows = [self.row[picks[n]][1] for n in of_size]
                selection.learn(rows, self.listed[size], [success[n] for n in of_size], [gain[n] for n in of_size])

    def state_dict(self) -> dict[str, Any]:
        return {"sizes": [selection.state_dict() for selection in self.selections.values()], "groups": self.groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.groups = state["groups"]
        for selection, saved in zip(self.selections.values(), state["sizes"], strict=True):
            selection.load_state_dict(saved)
