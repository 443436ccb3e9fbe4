"""How much of each colour a picture of the shapes world shows: a statistic with a gradient."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor
from torch.nn import functional as F

from rewards.base import Metadata, Scores, Spec
from rewards.shapes.draw import BACKGROUND, PALETTE, SIDES, SIZE
from rewards.shapes.grammar import parse
from rewards.vision import to_tensor

FILL = {"circle": np.pi / 4, "square": 1.0, "triangle": 0.56}
"""Share of its box that a shape covers."""
NEAREST = 0.02
"""Temperature of a pixel's choice among colours, in the same units as pixels."""
COVERED = 0.1
"""Temperature of whether a pixel is covered, which it is from half way to the colour on, in shares of the way."""


class ShapesMass:
    """Agreement of each colour's number of pixels with the prompt, in [0, 1].

    Colour by colour, the smaller of the shown and the wanted number of pixels over the larger, each summed. It knows
    neither shapes nor places: one large blob of the right colour is worth as much as four small squares.
    """

    name = "shapes_mass"
    spec = Spec(differentiable=True)

    def __call__(self, samples: Sequence[Image], prompts: Sequence[str], metadata: Metadata) -> Scores:
        with torch.no_grad():
            values = [self.score_pixels(to_tensor(s)[None], [p], [{}]).value for s, p in zip(samples, prompts)]
        return Scores(torch.cat(values))

    def score_pixels(self, pixels: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """See `DifferentiableReward.score_pixels`."""
        shown = masses(pixels.float())
        wanted = torch.stack([wanted_masses(prompt) for prompt in prompts]).to(shown)
        return Scores(torch.minimum(shown, wanted).sum(1) / torch.maximum(shown, wanted).sum(1))


def masses(pixels: Tensor) -> Tensor:
    """[B, 7] soft numbers of pixels of each colour, and of grey, in pictures [B, 3, H, W] brought to 32x32."""
    if pixels.shape[-2:] != (SIZE, SIZE):
        pixels = F.interpolate(pixels, (SIZE, SIZE), mode="area")
    background = torch.tensor(BACKGROUND).to(pixels) / 255
    inks = torch.tensor([*PALETTE.values(), (0, 0, 0)]).to(pixels) / 255 - background
    # how far a pixel is on the way from the background to each colour, as the checker has it
    along = torch.einsum("bchw,kc->bkhw", pixels - background[:, None, None], inks / inks.norm(dim=1, keepdim=True))
    lengths = inks.norm(dim=1)[:, None, None]
    covered = ((along / lengths - 0.5) / COVERED).sigmoid()
    return ((along / NEAREST).softmax(1) * covered).sum((2, 3))


@cache
def wanted_masses(prompt: str) -> Tensor:
    """[7] numbers of pixels that drawings of a prompt have on average; `ValueError` on a prompt outside the grammar."""
    request, colours = parse(prompt), list(PALETTE)
    smallest, largest = SIDES[len(request.things)]
    side = float(np.mean(np.arange(smallest, largest + 1) ** 2))
    wanted = torch.zeros(len(colours) + 1)
    for thing in request.things:
        wanted[colours.index(thing.colour)] += side * FILL[thing.shape]
    return wanted
