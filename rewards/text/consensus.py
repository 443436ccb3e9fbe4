"""Agreement in the place of a right answer, across questions that mean the same."""

from collections import Counter
from collections.abc import Sequence

import torch

from rewards.base import Metadata, Scores, Spec
from rewards.text.checks import needed
from rewards.text.shape import Majority


class CoMajority(Majority):
    """1 where a text gives the answer that most texts of its question's other wordings give (Co-Reward, arXiv
    2508.00410, and the authors' code): no right answer needed, and harder to agree on something wrong than `majority`.

    All wordings must be in one iteration: the selection `together` by the same key brings them. A text whose question
    has no other wording gets 0.

    Args:
        pattern: as of `majority`.
        key: key of the metadata that a question's wordings share.
    """

    name = "co_majority"
    spec = Spec(frozenset({"text", "prompt", "metadata"}), "set")

    def __init__(self, pattern: str | None = None, key: str = "pair") -> None:
        super().__init__(pattern)
        self.key = key

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        question = needed(self.name, self.key, prompts, metadata)
        answers = [self._answer(text) for text in samples]
        value, alone = torch.zeros(len(samples)), torch.zeros(len(samples))
        labels: dict[tuple[str, str], str] = {}
        for i, wording in enumerate(zip(question, prompts, strict=True)):
            if wording not in labels:
                others = [j for j, name in enumerate(question) if name == wording[0] and prompts[j] != wording[1]]
                votes = Counter(answers[j] for j in others if answers[j])
                labels[wording] = votes.most_common(1)[0][0] if votes else ""
            value[i] = float(answers[i] == labels[wording] != "")
            alone[i] = float(not labels[wording])
        return Scores(value, {"unlabelled": alone})
