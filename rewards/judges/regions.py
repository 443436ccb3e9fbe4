"""A judge that says where in a picture its objects are, and what each is worth (SRUM, arXiv 2510.12784)."""

import re
from collections.abc import Sequence
from typing import Unpack

from PIL.Image import Image

from rewards.base import Metadata, Region
from rewards.judges.local import Local
from rewards.judges.reward import AskingSettings, JudgeReward
from rewards.judges.served import Served
from rewards.judges.template import NUMBER

BOX = re.compile(
    r"box\s*:\s*\[?\s*" + r"\s*,\s*".join([r"(\d+)"] * 4) + r"\s*\]?\s+(?:score)\s*:\s*\[?" + NUMBER, re.IGNORECASE
)
"""A box in thousandths of the sides, and the score after it."""


class RegionJudge(JudgeReward):
    """A judge of each object in a picture, with its box; a picture's value is their mean in [0, 1].

    Args:
        template: whose replies have a box in thousandths and a score in [-1, 1] for each object.
    """

    def __init__(self, judge: Local | Served, template: str = "srum_regions", **asking: Unpack[AskingSettings]) -> None:
        super().__init__(template, judge, **asking)

    def regions(self, samples: Sequence[Image], prompts: Sequence[str], metadata: Metadata) -> list[list[Region]]:
        """Objects of each picture whose box and score can be read; none where the reply has none."""
        replies = self(samples, prompts, metadata).replies or [{}] * len(samples)
        return [regions_in("\n".join(written.values())) for written in replies]


def regions_in(reply: str) -> list[Region]:
    """The boxes of a reply that lie within the picture, with scores within [-1, 1]."""
    read = []
    for *sides, score in BOX.findall(reply.rpartition("</think>")[2]):
        box, reward = [int(side) / 1000 for side in sides], float(score)
        if box[0] < box[2] <= 1 and box[1] < box[3] <= 1 and -1 <= reward <= 1:
            read.append(Region(box, reward))
    return read
