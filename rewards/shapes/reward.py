"""The checker of the shapes world as a reward."""

from collections.abc import Sequence
from statistics import mean

import torch
from PIL.Image import Image

from rewards.base import Metadata, Region, Scores
from rewards.shapes.checker import check, find_objects
from rewards.shapes.draw import SIZE
from rewards.shapes.grammar import parse


class ShapesReward:
    """Rule-based: does the picture show the shapes its prompt asks for; in [0, 1].

    Parts: soft, strict, and by level: global (= soft), subject (the things asked for), relation (NaN where the prompt
    names none).

    Args:
        strict_weight: weight of passing every requirement; the rest goes to the share of requirements met.
    """

    name = "shapes"

    def __init__(self, strict_weight: float = 0.5) -> None:
        self.strict_weight = strict_weight

    def __call__(self, samples: Sequence[Image], prompts: Sequence[str], metadata: Metadata) -> Scores:
        verdicts = [check(image, prompt) for image, prompt in zip(samples, prompts, strict=True)]
        soft = torch.tensor([verdict.soft for verdict in verdicts])
        strict = torch.tensor([float(verdict.strict) for verdict in verdicts])
        value = self.strict_weight * strict + (1 - self.strict_weight) * soft
        subject = torch.tensor([float(mean(verdict.subjects)) for verdict in verdicts])
        relation = torch.tensor([float("nan") if v.relation is None else float(v.relation) for v in verdicts])
        return Scores(value, {"soft": soft, "strict": strict, "global": soft, "subject": subject, "relation": relation})

    def regions(self, samples: Sequence[Image], prompts: Sequence[str], metadata: Metadata) -> list[list[Region]]:
        """Objects of each picture: 1 where the prompt asks for one such, -1 for the others."""
        judged = []
        for image, prompt in zip(samples, prompts, strict=True):
            wanted, regions = list(parse(prompt).things), []
            for shape in find_objects(image):
                left, top = shape.x - shape.width / 2, shape.y - shape.height / 2
                sides = (left, top, left + shape.width, top + shape.height)
                is_wanted = shape.thing in wanted
                if is_wanted:
                    wanted.remove(shape.thing)
                regions.append(Region([side / SIZE for side in sides], 1.0 if is_wanted else -1.0))
            judged.append(regions)
        return judged
