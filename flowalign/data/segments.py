"""Documents cut into what was read and what comes next, for learning from plain text (RLPT, arXiv 2509.19249)."""

import re
from collections.abc import Iterator
from typing import Any

SENTENCE = r"(?<=[.!?])\s+"
"""End of a sentence."""


def segments(text: str, sentences: int = 1, context: int = 4) -> Iterator[dict[str, Any]]:
    """Beginnings of a document with the sentences that follow, as prompts with their answers.

    Args:
        sentences: number of sentences of an answer.
        context: fewest sentences of a prompt; each next prompt of the document has one answer more.
    """
    parts = [part for part in re.split(SENTENCE, " ".join(text.split())) if part]
    for begin in range(context, len(parts) - sentences + 1, sentences):
        yield {"prompt": " ".join(parts[:begin]), "answer": " ".join(parts[begin : begin + sentences])}
