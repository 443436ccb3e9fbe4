"""The rule by which a written verdict is right: what a judge that learns by RL is paid for."""

from collections.abc import Sequence

import torch

from rewards.base import Metadata, Scores, Spec
from rewards.judges.template import load_template
from rewards.text.checks import needed


class RightVerdict:
    """1 where a judge's reply names the side that people preferred, 0 for the other one, a tie, or nothing readable.

    It reads replies as the template does, so that scores of both sides serve too: SPCT (arXiv 2504.02495) pays where
    the better answer got the higher score. `flowalign pair-questions --template NAME` writes questions and answers.

    Args:
        template: one whose answer is a winner, such as text_scores.
        key: key of the metadata with the right label, one of the template's.
    """

    name = "right_verdict"
    spec = Spec(frozenset({"text", "prompt", "metadata"}))

    def __init__(self, template: str, key: str = "answer") -> None:
        loaded = load_template(template)
        if loaded.answer != "winner" or len(loaded.questions) != 1:
            raise ValueError(f"template '{template}': right_verdict reads one winner; text_scores works")
        self.question, self.key = loaded.questions[0], key

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        right = needed(self.name, self.key, prompts, metadata)
        wanted = [self.question.read_winner(f"{self.question.after} {label}") for label in right]
        winners = [self.question.read_winner(text) for text in samples]
        value = torch.tensor([float(winner == side) for winner, side in zip(winners, wanted, strict=True)])
        return Scores(value, {"unparsed": torch.tensor([float(winner is None) for winner in winners])})
