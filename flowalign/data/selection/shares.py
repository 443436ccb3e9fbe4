"""Prompts of several tasks, each with its share."""

from collections.abc import Mapping, Sequence
from typing import Any

from flowalign.data import Prompts
from flowalign.data.batches import shuffled
from flowalign.errors import ConfigError


class Shares:
    """Each task's share of the groups whatever the number of its prompts, each task's prompts in turn, shuffled.

    Shares hold exactly, not on average: every group goes to the task that is furthest behind its own.

    Args:
        by: key of the metadata that names the task, as of the reward `routed`.
        shares: share of each task, relative to the others; prompts of a task that is not named are not trained on.
    """

    name = "shares"

    def __init__(self, by: str, shares: Mapping[str, float]) -> None:
        if not shares or min(shares.values()) <= 0:
            raise ValueError("shares: give each task a share above 0")
        self.by = by
        self.shares = {task: share / sum(shares.values()) for task, share in shares.items()}
        self.drawn = dict.fromkeys(shares, 0)

    def picks(self, prompts: Prompts, iteration: int, groups: int, seed: int, round: int = 0) -> list[int]:
        members: dict[str, list[int]] = {task: [] for task in self.shares}
        for i, record in enumerate(prompts.metadata):
            if record.get(self.by) in members:
                members[record[self.by]].append(i)
        if lacking := [task for task, rows in members.items() if not rows]:
            raise ConfigError(f"data.selection.shares: no prompt has '{lacking[0]}' under '{self.by}' in its metadata")
        picks = []
        for _ in range(groups):
            after = sum(self.drawn.values()) + 1
            behind = {task: share * after - self.drawn[task] for task, share in self.shares.items()}
            task = max(behind, key=behind.__getitem__)
            picks.append(members[task][shuffled(len(members[task]), self.drawn[task], 1, seed)[0]])
            self.drawn[task] += 1
        return picks

    def learn(self, picks: Sequence[int], prompts: Prompts, success: Sequence[float], gain: Sequence[float]) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": dict(self.drawn)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = dict(state["drawn"])
