"""The embedded worlds: tiny prompts with an exact checker for each, so that a benchmark runs anywhere."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from flowalign.data import Prompts
from flowalign.evaluation.benchmarks.base import SampleScores, Suite, columns
from rewards import Metadata, Reward
from rewards.relations import RelationsReward
from rewards.shapes.reward import ShapesReward
from rewards.spelling import SpellingReward


class Shapes(Suite):
    """The shapes world: its held-out prompts, its checker; the mean strict pass over its four categories."""

    name = "shapes"
    headline = ("single", "counting", "two_objects", "position")

    def prompts(self) -> Prompts:
        return Prompts.read("shapes_heldout")

    def score(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> list[SampleScores]:
        rows = columns(ShapesReward(), samples, prompts, metadata)
        return [
            {record["category"]: row["strict"], "soft": row["soft"]} for row, record in zip(rows, metadata, strict=True)
        ]


class OneKind(Suite):
    """A world whose requests are all of one kind: the share of pictures that its checker passes."""

    headline = ("strict",)
    checker: ClassVar[Callable[[], Reward]]
    parts: ClassVar[tuple[str, ...]]
    """Parts of the checker's verdict that are shown."""

    def prompts(self) -> Prompts:
        return Prompts.read(f"{self.name}_heldout")

    def score(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> list[SampleScores]:
        rows = columns(type(self).checker(), samples, prompts, metadata)
        return [{name: row[name] for name in self.parts} for row in rows]


class Relations(OneKind):
    """The relations world: its held-out prompts, its checker; the share of pictures that are right."""

    name = "relations"
    checker = RelationsReward
    parts = ("strict", "soft", "placed")


class Spelling(OneKind):
    """The spelling world: words that no model was trained on; the share of pictures in which the word can be read."""

    name = "spelling"
    checker = SpellingReward
    parts = ("strict", "soft")
