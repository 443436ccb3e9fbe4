"""Judges of pairs: pairwise rewards as they are, pointwise ones by their scores."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL.Image import Image

from rewards.base import PairwiseReward, Reward, Scores, score


class ScoreJudge:
    """Compares two samples by a pointwise reward.

    Args:
        reward: whose higher score wins.
        margin: scores no further apart than this are a tie.
    """

    def __init__(self, reward: Reward, margin: float = 0.0) -> None:
        self.reward, self.margin = reward, margin
        self.name = f"judge({reward.name})"

    def compare(
        self,
        first: Sequence[Image],
        second: Sequence[Image],
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
    ) -> Scores:
        """1 where the first wins, 0 where the second does, 0.5 for a tie."""
        # a picture meets many others and is scored once
        known: dict[tuple[int, str], int] = {}
        pictures: list[tuple[Image, str, Mapping[str, Any]]] = []
        for side in (first, second):
            for image, prompt, record in zip(side, prompts, metadata, strict=True):
                if known.setdefault((id(image), prompt), len(pictures)) == len(pictures):
                    pictures.append((image, prompt, record))
        images, texts, records = zip(*pictures, strict=True)
        value = score(self.reward, images, texts, records).value
        a = value[[known[id(image), prompt] for image, prompt in zip(first, prompts, strict=True)]]
        b = value[[known[id(image), prompt] for image, prompt in zip(second, prompts, strict=True)]]
        gap = a - b
        return Scores(torch.where(gap.abs() <= self.margin, 0.5, (gap > 0).float()))


def as_judge(reward: Any) -> PairwiseReward:
    """A pairwise reward as it is, a pointwise one wrapped."""
    return reward if hasattr(reward, "compare") else ScoreJudge(reward)
