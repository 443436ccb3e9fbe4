"""The relations world: where the ink of two colours is, whatever its shape and however much of it there is.

It asks with the prompts of the shapes world that place things of two colours ("a red circle left of a blue square"),
and answers by another rule: no objects are told apart or counted, and the reward is a smooth one of the angle between
two centres. So a method that gains in both worlds does not gain by one rule alone.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from rewards.base import Metadata, Scores
from rewards.shapes.draw import BACKGROUND, PALETTE, SIZE
from rewards.shapes.grammar import Request, parse

ENOUGH = 20  # pixels of a colour; the smallest drawn triangle has 36
STRAY = 0.15  # of the ink may have other colours
DIRECTIONS = {"left of": (0, 1), "right of": (0, -1), "above": (1, 0), "below": (-1, 0)}
"""Direction from the first object to the second, down and across."""


def is_of_two_colours(request: Request) -> bool:
    """Whether the world asks this."""
    return request.relation is not None and request.things[0].colour != request.things[1].colour


def inked(image: Image.Image) -> dict[str, NDArray[np.bool_]]:
    """The pixels [32, 32] of each colour: at least half covered, and nearer to it than to the others."""
    if image.size != (SIZE, SIZE):
        image = image.resize((SIZE, SIZE), Image.Resampling.BOX)
    ink = np.asarray(image.convert("RGB"), dtype=np.float64) - BACKGROUND
    full = np.array(list(PALETTE.values()), dtype=np.float64) - BACKGROUND
    lengths = np.linalg.norm(full, axis=1)
    along = ink @ (full / lengths[:, None]).T
    nearest = along.argmax(axis=-1)
    covered = along.max(axis=-1) > lengths[nearest] / 2
    return {colour: covered & (nearest == i) for i, colour in enumerate(PALETTE)}


def check(image: Image.Image, prompt: str) -> tuple[float, float, float, bool]:
    """Amounts of the first and the second colour and quality of their placement, in [0, 1]; and whether all is right.
    Raises `ValueError` on a prompt that the world does not ask."""
    request = parse(prompt)
    if not is_of_two_colours(request):
        raise ValueError(f"{prompt!r} does not place two colours; 'a red circle left of a blue square' does")
    assert request.relation is not None
    pixels = inked(image)
    both = [pixels[thing.colour] for thing in request.things]
    first, second = (min(1.0, mask.sum() / ENOUGH) for mask in both)
    if first == 0 or second == 0:
        return first, second, 0.0, False
    way = np.argwhere(both[1]).mean(axis=0) - np.argwhere(both[0]).mean(axis=0)
    cosine = float(way @ DIRECTIONS[request.relation] / max(float(np.linalg.norm(way)), 1e-9))
    everything = sum(int(mask.sum()) for mask in pixels.values())
    clean = everything - sum(mask.sum() for mask in both) <= STRAY * everything
    # nearer to the asked direction than to any other
    right = first == second == 1 and clean and cosine > 0.5**0.5
    return first, second, first * second * (1 + cosine) / 2, bool(right)


class RelationsReward:
    """Rule-based: do two colours stand to each other as the prompt says; in [0, 1].

    Parts: soft (the mean of how much there is of each colour and of how well they are placed), strict, placed.

    Args:
        strict_weight: weight of `strict`; the rest goes to `soft`.
    """

    name = "relations"

    def __init__(self, strict_weight: float = 0.5) -> None:
        self.strict_weight = strict_weight

    def __call__(self, samples: Sequence[Image.Image], prompts: Sequence[str], metadata: Metadata) -> Scores:
        rows = [check(image, prompt) for image, prompt in zip(samples, prompts, strict=True)]
        table = torch.tensor(rows, dtype=torch.float32).reshape(-1, 4)
        soft, placed, strict = table[:, :3].mean(dim=1), table[:, 2], table[:, 3]
        value = self.strict_weight * strict + (1 - self.strict_weight) * soft
        return Scores(value, {"soft": soft, "strict": strict, "placed": placed})
