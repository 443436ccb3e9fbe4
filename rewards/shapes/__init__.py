"""The shapes world: a prompt grammar, pictures that obey it, and a checker that reads them back."""

from rewards.shapes.checker import Verdict, check
from rewards.shapes.draw import draw
from rewards.shapes.grammar import (
    CATEGORIES,
    Request,
    Thing,
    all_requests,
    heldout_requests,
    parse,
    sample_requests,
    train_requests,
)

__all__ = [
    "CATEGORIES",
    "Request",
    "Thing",
    "Verdict",
    "all_requests",
    "check",
    "draw",
    "heldout_requests",
    "parse",
    "sample_requests",
    "train_requests",
]
