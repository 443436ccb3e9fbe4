"""The prompt grammar of the shapes world, in the manner of GenEval.

Four categories of prompt over three shapes and six colours:

    single        a red circle
    counting      one red circle / three orange squares
    two_objects   a red circle and a blue square
    position      a red circle left of a blue square

A `Request` is what a prompt asks for; `Request.prompt` writes it in English and `parse` reads it back. The
grammar is finite (1,620 prompts), so train and held-out prompts are fixed lists.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from hashlib import sha256

import numpy as np

SHAPES = ("circle", "square", "triangle")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple")
NUMBERS = ("one", "two", "three", "four")
OPPOSITES = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
RELATIONS = tuple(OPPOSITES)
CATEGORIES = ("single", "counting", "two_objects", "position")


@dataclass(frozen=True)
class Thing:
    """One object: a colour of `COLOURS` and a shape of `SHAPES`."""

    colour: str
    shape: str

    def __str__(self) -> str:
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class Request:
    """Content of a prompt: exactly these `things`, 1 to 4 of them, and nothing else.

    For `position`, the first thing stands in `relation` (one of `RELATIONS`) to the second.
    """

    category: str
    things: tuple[Thing, ...]
    relation: str | None = None

    @property
    def prompt(self) -> str:
        """The request in English."""
        first, last = self.things[0], self.things[-1]
        match self.category:
            case "single":
                return _with_article(first)
            case "counting":
                plural = "s" if len(self.things) > 1 else ""
                return f"{NUMBERS[len(self.things) - 1]} {first}{plural}"
            case "two_objects":
                return f"{_with_article(first)} and {_with_article(last)}"
            case _:
                return f"{_with_article(first)} {self.relation} {_with_article(last)}"

    @property
    def twin(self) -> "Request | None":
        """The other request with the same meaning ("a red circle" and "one red circle"), if there is one."""
        if self.category == "single":
            return Request("counting", self.things)
        if self.category == "counting":
            return Request("single", self.things) if len(self.things) == 1 else None
        return Request(self.category, self.things[::-1], self.relation and OPPOSITES[self.relation])


def _with_article(thing: Thing) -> str:
    return f"{'an' if str(thing)[0] in 'aeiou' else 'a'} {thing}"


@cache
def all_requests() -> tuple[Request, ...]:
    """Every request of the grammar, in a fixed order."""
    things = [Thing(colour, shape) for colour in COLOURS for shape in SHAPES]
    pairs = [(first, second) for first in things for second in things if first != second]
    return (
        *(Request("single", (thing,)) for thing in things),
        *(Request("counting", (thing,) * number) for number in (1, 2, 3, 4) for thing in things),
        *(Request("two_objects", pair) for pair in pairs),
        *(Request("position", pair, relation) for relation in RELATIONS for pair in pairs),
    )


@cache
def _by_prompt() -> dict[str, Request]:
    return {request.prompt: request for request in all_requests()}


def parse(prompt: str) -> Request:
    """Read a prompt back; case and extra spaces do not matter. Raises `ValueError` outside the grammar."""
    text = " ".join(prompt.lower().split())
    try:
        return _by_prompt()[text]
    except KeyError:
        near = get_close_matches(text, _by_prompt(), n=1, cutoff=0.0) or ["a red circle"]
        raise ValueError(f"{prompt!r} is not a shapes prompt; did you mean {near[0]!r}?") from None


@cache
def heldout_requests() -> tuple[Request, ...]:
    """The fixed held-out requests, in grammar order; the list is closed under `Request.twin`.

    Of each kind of request (single, each number, two objects, left of, above) the first few by hash, and
    their twins.
    """
    picks: dict[tuple[str, int, str | None], int] = {("single", 1, None): 5, ("two_objects", 2, None): 12}
    picks |= {("counting", number, None): 5 for number in (2, 3, 4)}
    picks |= {("position", 2, relation): 8 for relation in ("left of", "above")}
    by_hash = sorted(all_requests(), key=lambda request: sha256(request.prompt.encode()).digest())
    chosen: set[Request] = set()
    for kind, count in picks.items():
        same_kind = [r for r in by_hash if (r.category, len(r.things), r.relation) == kind]
        chosen.update(same_kind[:count])
    chosen.update([request.twin for request in chosen if request.twin])
    return tuple(request for request in all_requests() if request in chosen)


@cache
def train_requests() -> tuple[Request, ...]:
    """All other requests: none of them is held out, nor means the same as a held-out one."""
    heldout = set(heldout_requests())
    return tuple(request for request in all_requests() if request not in heldout)


def sample_requests(
    requests: Sequence[Request], count: int, rng: np.random.Generator, weights: dict[str, float] | None = None
) -> list[Request]:
    """Draw `count` requests: first a category by `weights` (equal by default), then a request of it.

    Counting draws its number uniformly, since every number has as many requests up to those held out.
    """
    pools = {name: [r for r in requests if r.category == name] for name in CATEGORIES}
    share = np.array([(weights or {}).get(name, 0.0 if weights else 1.0) if pools[name] else 0.0 for name in pools])
    categories = rng.choice(CATEGORIES, size=count, p=share / share.sum())
    return [pools[str(name)][rng.integers(len(pools[str(name)]))] for name in categories]
