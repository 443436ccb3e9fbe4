"""Every prompt in turn, those that belong together side by side."""

import numpy as np

from flowalign.data import Prompts
from flowalign.data.selection.shuffled import Shuffled


class Together(Shuffled):
    """Shuffled prompts, where those with the same value under a key of the metadata come in one iteration.

    The two questions of a pair have opposite answers: in one update, what they say for an answer whatever is shown
    (the first picture; yes) cancels, and what is left is about the pictures. Apart, that part is noise.

    Args:
        key: the prompts have it; `pair` in the questions of `flowalign pair-questions`. Prompts without it are alone.
            An iteration takes whole sets where prompts_per_iteration is a multiple of their size.
    """

    name = "together"

    def __init__(self, key: str = "pair") -> None:
        super().__init__()
        self.key = key

    def picks(self, prompts: Prompts, iteration: int, groups: int, seed: int, round: int = 0) -> list[int]:
        sets: dict[object, list[int]] = {}
        for i, record in enumerate(prompts.metadata):
            sets.setdefault(record.get(self.key, ("alone", i)), []).append(i)
        members = list(sets.values())
        positions = range(self.drawn, self.drawn + groups)
        self.drawn += groups
        orders = {
            epoch: [i for one in np.random.default_rng([seed, epoch]).permutation(len(members)) for i in members[one]]
            for epoch in {position // len(prompts) for position in positions}
        }
        return [orders[position // len(prompts)][position % len(prompts)] for position in positions]
