"""What a judge can be asked; the same whichever way the model runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Question:
    """Pictures, then a text, as one user message."""

    pictures: tuple[Any, ...]
    """PIL images; a local judge's `label_logits` takes tensors [3, H, W] in [0, 1] too, with gradients."""
    text: str
    system: str = ""


class Judge(Protocol):
    """A vision-language model. Every method answers N questions in order."""

    def choose(self, questions: Sequence[Question], labels: Sequence[str]) -> list[list[float] | None]:
        """Probabilities of the labels, renormalised over them, from the first token of the reply.

        A token counts for the label that it spells, spaces and case aside. None where the reply begins with none of
        the labels as far as the backend can see.
        """

    def echo(self, questions: Sequence[Question], answers: Sequence[str]) -> list[float]:
        """Mean log-probability of an answer's tokens, given its question."""

    def reply(self, questions: Sequence[Question], temperature: float, max_tokens: int, seed: int) -> list[str]:
        """Written answers; temperature 0 takes the most probable token each time."""


def spells(token: str, label: str) -> bool:
    """Whether a token is a label, spaces and case aside."""
    return token.strip().lower() == label.strip().lower()
