"""Procedural pictures of a request: coloured shapes on a light background, 32x32 pixels or a multiple."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from rewards.shapes.grammar import Request

SIZE = 32
BACKGROUND = (243, 243, 243)
PALETTE = {
    "red": (220, 40, 40),
    "orange": (245, 140, 20),
    "yellow": (240, 215, 30),
    "green": (40, 165, 60),
    "blue": (40, 90, 220),
    "purple": (150, 60, 190),
}
SIDES = {
    1: (8, 15),
    2: (8, 12),
    3: (8, 10),
    4: (8, 10),
}  # smallest and largest side in pixels, by number of objects
GAP = 2  # pixels between the boxes of two objects
DOMINANCE = 1.3  # a drawn "left of" is this much more horizontal than vertical
_TRIES = 128  # layouts proposed at once; four objects take about 60
_SUBSAMPLES = 4  # a side of a pixel, for anti-aliasing


def inside(shape: str, y: NDArray[np.floating], x: NDArray[np.floating]) -> NDArray[np.bool_]:
    """Whether points are inside a shape that fills the box [-1, 1] x [-1, 1] (y down); y and x broadcast.

    The triangle stands on its base and has a blunt tip, which a pixel can show.
    """
    if shape == "circle":
        return y**2 + x**2 <= 1
    half_width = 0.12 + 0.44 * (y + 1) if shape == "triangle" else 1
    return (abs(y) <= 1) & (abs(x) <= half_width)


def draw(request: Request, rng: np.random.Generator, scale: int = 1) -> NDArray[np.uint8]:
    """Draw a picture that meets `request`, uint8 [32 scale, 32 scale, 3]; sizes, places and tones vary with `rng`."""
    picture = np.full((scale * SIZE, scale * SIZE, 3), BACKGROUND, dtype=np.float64) + rng.integers(-4, 5)
    for thing, box in zip(request.things, _layout(request, rng), strict=True):
        top, left, side = (scale * pixels for pixels in box)
        colour = np.array(PALETTE[thing.colour]) + rng.integers(-8, 9, size=3)
        patch = picture[top : top + side, left : left + side]
        patch += coverage(thing.shape, side) * (colour - patch)
    return picture.clip(0, 255).round().astype(np.uint8)


@cache
def coverage(shape: str, side: int) -> NDArray[np.float64]:
    """The covered share of each pixel of a shape, [side, side, 1]."""
    fine = (np.arange(side * _SUBSAMPLES) + 0.5) / (side * _SUBSAMPLES) * 2 - 1
    hits = inside(shape, fine[:, None], fine[None, :])
    return hits.reshape(side, _SUBSAMPLES, side, _SUBSAMPLES).mean(axis=(1, 3))[..., None]


def _layout(request: Request, rng: np.random.Generator) -> list[list[int]]:
    """Boxes (top, left, side) in pixels, one for each thing, that keep apart and stand in the relation."""
    count = len(request.things)
    smallest, largest = SIDES[count]
    first, second = np.triu_indices(count, k=1)
    while True:
        sides = rng.integers(smallest, largest, size=(_TRIES, count), endpoint=True)
        corners = rng.integers(1, SIZE - sides[..., None], size=(_TRIES, count, 2))
        centres = corners + sides[..., None] / 2
        distances = abs(centres[:, first] - centres[:, second]).max(axis=-1)
        fits = (distances >= (sides[:, first] + sides[:, second]) / 2 + GAP).all(axis=-1)
        if request.relation is not None:
            dy, dx = (centres[:, 1] - centres[:, 0]).T
            along, across = (dx, dy) if request.relation in ("left of", "right of") else (dy, dx)
            sign = 1 if request.relation in ("left of", "above") else -1
            fits &= sign * along >= DOMINANCE * abs(across)
        if fits.any():
            chosen = fits.argmax()
            return np.column_stack([corners[chosen], sides[chosen]]).tolist()
