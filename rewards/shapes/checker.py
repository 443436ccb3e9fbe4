"""Read a picture of the shapes world back and compare it with its prompt.

A pixel is background + coverage * (colour - background). So its difference from the background gives the
colour by its direction and the coverage by its length. Connected pixels of one colour make an object; its
shape is the template with which it overlaps most.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from rewards.shapes.draw import BACKGROUND, PALETTE, SIZE, inside
from rewards.shapes.grammar import NUMBERS, SHAPES, Thing, parse

MIN_PIXELS = 8  # smaller specks are not objects
MIN_OVERLAP = 0.8  # intersection over union with the best template; below it the shape is a "blob"
MAX_ASPECT = 1.5  # the longer over the shorter side; above it too
_COLOURS = (*PALETTE, "grey")  # grey: darker than the background, yet none of the six
_INKS = np.array([*PALETTE.values(), (0, 0, 0)]) - np.array(BACKGROUND, dtype=np.float64)
_LENGTHS = np.linalg.norm(_INKS, axis=1)
_WITHIN_A_COLOUR = np.zeros((3, 3, 3), dtype=np.int8)  # neighbours up, down, left and right; never another colour
_WITHIN_A_COLOUR[1] = ndimage.generate_binary_structure(2, 1)


@dataclass(frozen=True, kw_only=True)
class FoundShape:
    """An object found in a picture; `y` and `x` are the centre of its box in pixels of a 32x32 picture."""

    colour: str
    shape: str
    y: float
    x: float
    height: int
    """Height of its box, in pixels."""
    width: int

    @property
    def thing(self) -> Thing:
        return Thing(self.colour, self.shape)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`requirements` by name and whether each is met; `soft` is the share met, `strict` whether all are."""

    soft: float
    strict: bool
    requirements: dict[str, bool]
    subjects: tuple[bool, bool]
    """Whether each subject is there: both things, or colour and shape where there is one thing."""
    relation: bool | None
    """Whether the second stands to the first as the prompt says; None where it says nothing."""


def check(image: Image.Image, prompt: str) -> Verdict:
    """Whether `image` shows what `prompt` asks for. Raises `ValueError` on a prompt outside the grammar."""
    request = parse(prompt)
    objects = find_objects(image)
    things = [item.thing for item in objects]
    first, last, number = request.things[0], request.things[-1], len(request.things)
    if request.category in ("single", "counting"):
        requirements = {
            f"all {first.colour}": bool(things) and all(thing.colour == first.colour for thing in things),
            f"all {first.shape}s": bool(things) and all(thing.shape == first.shape for thing in things),
        }
    else:
        requirements = {str(first): first in things, str(last): last in things}
    one, other = requirements.values()
    requirements[f"{NUMBERS[number - 1]} in all"] = len(objects) == number
    relation = None
    if request.relation:
        relation = requirements[request.relation] = any(
            stands(request.relation, a, b) for a in objects for b in objects if (a.thing, b.thing) == (first, last)
        )
    met = sum(requirements.values())
    soft, strict = met / len(requirements), met == len(requirements)
    return Verdict(soft=soft, strict=strict, requirements=requirements, subjects=(one, other), relation=relation)


def stands(relation: str, first: FoundShape, second: FoundShape) -> bool:
    """Whether `first` stands in `relation` to `second`, judged along the axis of their greater distance."""
    dy, dx = second.y - first.y, second.x - first.x
    if abs(dx) > abs(dy):
        return relation == ("left of" if dx > 0 else "right of")
    return relation == ("above" if dy > 0 else "below")


def find_objects(image: Image.Image) -> list[FoundShape]:
    """The objects in a picture; one that is not 32x32 pixels is resized first."""
    if image.size != (SIZE, SIZE):
        image = image.resize((SIZE, SIZE), Image.Resampling.BOX)
    ink = np.asarray(image.convert("RGB"), dtype=np.float64) - BACKGROUND
    along = ink @ (_INKS / _LENGTHS[:, None]).T  # [32, 32, colours], length along each colour's direction
    nearest = along.argmax(axis=-1)
    covered = along.max(axis=-1) > _LENGTHS[nearest] / 2
    layers = covered & (nearest == np.arange(len(_COLOURS))[:, None, None])  # [colours, 32, 32]
    labels, _ = ndimage.label(layers, structure=_WITHIN_A_COLOUR)
    objects = []
    for index, (colour, rows, columns) in enumerate(ndimage.find_objects(labels), start=1):
        mask = labels[colour, rows, columns][0] == index
        if mask.sum() >= MIN_PIXELS:
            y, x = (rows.start + rows.stop) / 2, (columns.start + columns.stop) / 2
            name, (height, width) = _COLOURS[colour.start], mask.shape
            objects.append(FoundShape(colour=name, shape=_shape(mask), y=y, x=x, height=height, width=width))
    return objects


def _shape(mask: NDArray[np.bool_]) -> str:
    """The shape of an object from its mask [height, width], cut to its box; "blob" if none of `SHAPES`."""
    height, width = mask.shape
    if max(height, width) > MAX_ASPECT * min(height, width):
        return "blob"
    templates = _templates(height, width)
    overlap = (templates & mask).sum(axis=(1, 2)) / (templates | mask).sum(axis=(1, 2))
    best = int(overlap.argmax())
    return SHAPES[best] if overlap[best] >= MIN_OVERLAP else "blob"


@cache
def _templates(height: int, width: int) -> NDArray[np.bool_]:
    """Each of `SHAPES` filling a box: [shapes, height, width]."""
    y = (np.arange(height) + 0.5) / height * 2 - 1
    x = (np.arange(width) + 0.5) / width * 2 - 1
    return np.stack([inside(shape, y[:, None], x[None, :]) for shape in SHAPES])
