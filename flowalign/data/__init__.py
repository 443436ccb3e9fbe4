"""Prompts, preferences, and the batches drawn from them."""

from flowalign.data.files import ASSETS
from flowalign.data.prompts import Difficulty, Preferences, PromptList, Prompts, Source, shipped

__all__ = [
    "ASSETS",
    "Difficulty",
    "Preferences",
    "PromptList",
    "Prompts",
    "Source",
    "shipped",
]
