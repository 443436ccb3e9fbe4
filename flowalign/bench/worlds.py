"""The embedded worlds: tiny prompts with an exact checker each, so that a benchmark runs anywhere."""

from collections.abc import Sequence
from typing import Any

from flowalign.bench.base import SampleScores, Suite, columns
from flowalign.data import Prompts
from rewards import Metadata
from rewards.relations import RelationsReward
from rewards.shapes.reward import ShapesReward


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


class Relations(Suite):
    """The relations world: its held-out prompts, its checker; the share of pictures that are right."""

    name = "relations"
    headline = ("strict",)

    def prompts(self) -> Prompts:
        return Prompts.read("relations_heldout")

    def score(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> list[SampleScores]:
        rows = columns(RelationsReward(), samples, prompts, metadata)
        return [{name: row[name] for name in ("strict", "soft", "placed")} for row in rows]
