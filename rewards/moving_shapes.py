"""The world of moving shapes: videos of one drawn shape that moves, and a checker that reads them back.

A prompt ('a red circle moving left') names one of 4 colours, 3 shapes and 4 directions: 48 prompts, of which each of
the 12 things has one direction held out. The checker finds objects in each frame as the shapes world does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from rewards.base import Metadata, Scores, Spec
from rewards.shapes.checker import FoundShape, find_objects
from rewards.shapes.draw import BACKGROUND, PALETTE, coverage
from rewards.shapes.draw import SIZE as ENLARGED
from rewards.shapes.grammar import SHAPES, Thing

FRAMES, SIZE = 7, 16
COLOURS = ("red", "yellow", "green", "blue")
DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
"""Each word and its direction, down and across."""
SIDES = (7, 8)
PATH = 3.0
"""Pixels between the first and the last frame that count as moving; drawings go six."""
STRAIGHT = 2.0
"""Least ratio of a movement to the left to the movement up or down beside it."""
STEP = 0.2
"""Pixels between two frames that count as moving; drawings go one."""


@dataclass(frozen=True)
class Movement:
    """Content of a prompt: this thing, alone, moving in this one of `DIRECTIONS`."""

    thing: Thing
    direction: str

    @property
    def prompt(self) -> str:
        return f"a {self.thing} moving {self.direction}"


@cache
def all_movements() -> tuple[Movement, ...]:
    """All 48, in a fixed order."""
    things = [Thing(colour, shape) for colour in COLOURS for shape in SHAPES]
    return tuple(Movement(thing, direction) for thing in things for direction in DIRECTIONS)


@cache
def heldout_movements() -> tuple[Movement, ...]:
    """12: one direction of each thing, each direction three times, so that all words are in the others too."""
    return tuple(
        movement
        for movement in all_movements()
        if list(DIRECTIONS).index(movement.direction)
        == (COLOURS.index(movement.thing.colour) + SHAPES.index(movement.thing.shape)) % len(DIRECTIONS)
    )


@cache
def train_movements() -> tuple[Movement, ...]:
    """The 36 others."""
    return tuple(movement for movement in all_movements() if movement not in heldout_movements())


def parse(prompt: str) -> Movement:
    """Read a prompt back; case and extra spaces do not matter. Raises `ValueError` outside the grammar."""
    text = " ".join(prompt.lower().split())
    for movement in all_movements():
        if movement.prompt == text:
            return movement
    raise ValueError(f"{prompt!r} is no prompt of moving shapes; 'a red circle moving left' is one")


def draw(movement: Movement, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Frames uint8 [7, 16, 16, 3] that meet a prompt, a pixel further each; size, place and tone vary with `rng`."""
    side, way = int(rng.choice(SIDES)), np.array(DIRECTIONS[movement.direction])
    lowest, highest = np.maximum(0, -way) * (FRAMES - 1), SIZE - side - np.maximum(0, way) * (FRAMES - 1)
    start = rng.integers(lowest, highest, endpoint=True)
    colour = np.array(PALETTE[movement.thing.colour]) + rng.integers(-8, 9, size=3)
    frames = np.tile(np.array(BACKGROUND, dtype=np.float64), (FRAMES, SIZE, SIZE, 1))
    for frame, (top, left) in zip(frames, start + way * np.arange(FRAMES)[:, None], strict=True):
        patch = frame[top : top + side, left : left + side]
        patch += coverage(movement.thing.shape, side) * (colour - patch)
    return frames.clip(0, 255).round().astype(np.uint8)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a video shows of its prompt; `soft` is the mean of the three shares, `strict` whether all is right."""

    colour: float
    """Share of frames with one object, of the colour asked for."""
    shape: float
    """Share of frames with one object, of the shape asked for."""
    direction: float
    """Share of the steps between frames that go as asked."""
    strict: bool
    """Colour and shape are right in all frames, and so is the way from the first to the last."""

    @property
    def soft(self) -> float:
        return (self.colour + self.shape + self.direction) / 3


def check(frames: Sequence[Image.Image], prompt: str) -> Verdict:
    """Whether a video shows what its prompt asks for. Raises `ValueError` on a prompt outside the grammar."""
    movement = parse(prompt)
    seen = [only_object(frame) for frame in frames]
    colours = [found is not None and found.colour == movement.thing.colour for found in seen]
    shapes = [found is not None and found.shape == movement.thing.shape for found in seen]
    steps = [goes(movement.direction, a, b, STEP) for a, b in zip(seen, seen[1:], strict=False)]
    return Verdict(
        colour=float(np.mean(colours)),
        shape=float(np.mean(shapes)),
        direction=float(np.mean(steps)),
        strict=all(colours) and all(shapes) and goes(movement.direction, seen[0], seen[-1], PATH),
    )


def only_object(frame: Image.Image) -> FoundShape | None:
    """The object in a frame if there is one and no other; its place is in pixels of the enlarged frame."""
    found = find_objects(frame.convert("RGB").resize((ENLARGED, ENLARGED), Image.Resampling.LANCZOS))
    return found[0] if len(found) == 1 else None


def goes(direction: str, first: FoundShape | None, second: FoundShape | None, least: float) -> bool:
    """Whether an object goes in a direction between two frames, by at least so many pixels of a frame."""
    if first is None or second is None:
        return False
    moved = np.array([second.y - first.y, second.x - first.x]) * SIZE / ENLARGED
    way = np.array(DIRECTIONS[direction])
    along, across = float(moved @ way), float(abs(moved @ way[::-1]))
    return along >= least and along >= STRAIGHT * across


class MovingShapesReward:
    """Rule-based: does a video show the shape its prompt asks for, moving as it asks; in [0, 1].

    Parts: soft, strict, colour, shape, direction (see `Verdict`).

    Args:
        strict_weight: weight of `strict`; the rest goes to `soft`.
    """

    name = "moving_shapes"
    spec = Spec(needs=frozenset({"frames", "prompt"}))

    def __init__(self, strict_weight: float = 0.5) -> None:
        self.strict_weight = strict_weight

    def __call__(self, samples: Sequence[Sequence[Image.Image]], prompts: Sequence[str], metadata: Metadata) -> Scores:
        verdicts = [check(frames, prompt) for frames, prompt in zip(samples, prompts, strict=True)]
        parts = {
            part: torch.tensor([float(getattr(verdict, part)) for verdict in verdicts])
            for part in ("soft", "strict", "colour", "shape", "direction")
        }
        return Scores(self.strict_weight * parts["strict"] + (1 - self.strict_weight) * parts["soft"], parts)
