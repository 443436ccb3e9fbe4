"""Texts that came about in turns: what a language model wrote, and what an environment answered."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rewards.base import Metadata, RewardError, Scores, Spec


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Place of the model's part of a turn in a transcript, and its reward."""

    begin: int
    """Characters of the text before it."""
    end: int
    """Characters of the text up to its end; the environment's answer follows."""
    context: int
    """Tokens of the transcript before it."""
    reward: float
    state: str


class Transcript(str):
    """A text of turns, the environment's answers among them; rewards get it where they would get a text.

    Args:
        turns: the model's, in order.
        tokens: ids of the prompt and the text as the model got them, special tokens included.
    """

    turns: list[Turn]
    tokens: list[int]

    def __new__(cls, text: str, turns: list[Turn], tokens: list[int]) -> "Transcript":
        transcript = super().__new__(cls, text)
        transcript.turns, transcript.tokens = turns, tokens
        return transcript

    def __getnewargs__(self) -> tuple[str, list[Turn], list[int]]:  # type: ignore[override]
        """Arguments from which another process, such as a verifier's, makes it again."""
        return str(self), self.turns, self.tokens


class EnvironmentReward:
    """Rewards of the environment: the sum over the turns, each of which is a step."""

    name = "environment"
    spec = Spec(frozenset({"text", "prompt"}))

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        for text in samples:
            if not isinstance(text, Transcript):
                raise RewardError(
                    f"reward '{self.name}' is what an environment pays, and there is none: the configuration's "
                    "`environment` names one"
                )
        turns = [text.turns for text in samples if isinstance(text, Transcript)]
        steps = [[(turn.end, turn.reward) for turn in row] for row in turns]
        value = torch.tensor([sum(turn.reward for turn in row) for row in turns], dtype=torch.float32)
        return Scores(value, {"turns": torch.tensor([float(len(row)) for row in turns])}, steps)
