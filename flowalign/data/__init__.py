"""Prompts, preferences, and the batches drawn from them."""

from flowalign.data.batches import Batch, draw_batch, draw_groups, shuffled
from flowalign.data.files import ASSETS
from flowalign.data.prompts import Difficulty, Preferences, PromptList, Prompts, Source, shipped

__all__ = [
    "ASSETS",
    "Batch",
    "Difficulty",
    "Preferences",
    "PromptList",
    "Prompts",
    "Source",
    "draw_batch",
    "draw_groups",
    "shipped",
    "shuffled",
]
