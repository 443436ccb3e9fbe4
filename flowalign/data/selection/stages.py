"""Prompts by stages, easy ones first."""

from collections.abc import Mapping, Sequence
from typing import Any

from flowalign.data import Prompts
from flowalign.data.batches import shuffled
from flowalign.errors import ConfigError


class Stages:
    """Prompts of one stage after the other, each stage's in turn, shuffled.

    Curr-ReFT (arXiv 2503.07065) goes from perception to reasoning, MedCCO (arXiv 2505.19213) from closed to open
    questions, MIRAGE from hard to easy; their abstracts were at hand, which give no schedule. `routed` gives each stage
    a reward of its own.

    Args:
        by: key of the metadata that names a prompt's stage.
        begins: first iteration of each stage; one of them begins at 0. Prompts of stages without one are not trained
        on.
        earlier: share of the groups that are of earlier stages, so that these are not forgotten.
    """

    name = "stages"

    def __init__(self, by: str, begins: Mapping[str, int], earlier: float = 0.0) -> None:
        if not begins or min(begins.values()) != 0 or len(set(begins.values())) < len(begins):
            raise ValueError("stages: `begins` has the first iteration of each stage, all different, the lowest 0")
        if not 0 <= earlier < 1:
            raise ValueError("stages: earlier in [0, 1)")
        self.by, self.earlier = by, earlier
        self.begins = dict(sorted(begins.items(), key=lambda item: item[1]))
        self.drawn = dict.fromkeys(self.begins, 0)

    def picks(self, prompts: Prompts, iteration: int, groups: int, seed: int, round: int = 0) -> list[int]:
        members = {
            stage: [i for i, record in enumerate(prompts.metadata) if str(record.get(self.by)) == stage]
            for stage in self.begins
        }
        if lacking := [stage for stage, rows in members.items() if not rows]:
            raise ConfigError(f"data.selection.stages: no prompt has '{lacking[0]}' under '{self.by}' in its metadata")
        *before, now = [stage for stage, begin in self.begins.items() if begin <= iteration]
        picks = []
        for number in range(groups):
            repeats = bool(before) and int((number + 1) * self.earlier) > int(number * self.earlier)
            stage = min(before, key=self.drawn.__getitem__) if repeats else now
            picks.append(members[stage][shuffled(len(members[stage]), self.drawn[stage], 1, seed)[0]])
            self.drawn[stage] += 1
        return picks

    def learn(self, picks: Sequence[int], prompts: Prompts, success: Sequence[float], gain: Sequence[float]) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": dict(self.drawn)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = dict(state["drawn"])
