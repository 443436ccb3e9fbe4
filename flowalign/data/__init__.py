"""Prompts and preferences; the batches drawn from them are in `flowalign.data.batches`."""

from flowalign.data.files import ASSETS
from flowalign.data.prompts import Difficulty, Preferences, PromptList, Prompts, Source, shipped
from flowalign.data.targets import Judged, Labels, Targets

__all__ = [
    "ASSETS",
    "Difficulty",
    "Judged",
    "Labels",
    "Preferences",
    "PromptList",
    "Prompts",
    "Source",
    "Targets",
    "shipped",
]
