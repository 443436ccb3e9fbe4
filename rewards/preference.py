"""Preferences: judges of pairs, and the win rate, which makes one value a sample of their verdicts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from rewards.base import (
    UNPARSED,
    Metadata,
    PairwiseReward,
    Reward,
    RewardError,
    Scores,
    Spec,
    advance,
    as_reward,
    groups,
    score,
    spec_of,
)


class ScoreJudge:
    """Compares two samples by a pointwise reward.

    Args:
        reward: whose higher score wins.
        margin: scores no further apart than this are a tie.
    """

    def __init__(self, reward: Reward, margin: float = 0.0) -> None:
        self.reward, self.margin = reward, margin
        self.name = reward.name

    @property
    def spec(self) -> Spec:
        return replace(spec_of(self.reward), kind="pairwise")

    def advance(self, progress: float) -> None:
        """Pass on how far training is, in [0, 1]."""
        advance(self.reward, progress)

    def compare(
        self,
        first: Sequence[Image],
        second: Sequence[Image],
        prompts: Sequence[str],
        metadata: Metadata,
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
    return reward if hasattr(reward, "compare") else ScoreJudge(as_reward(reward))


class WinRate:
    """The mean probability of a sample to beat others of its group (Pref-GRPO, arXiv 2508.20751).

    Every pair is asked in both orders, so that a judge's liking for the first place cancels. A sample alone in its
    group gets 0.5.

    Args:
        reward: a pairwise reward, or a pointwise one whose higher score wins.
        opponents: how many members on either side of a sample it is compared with, the group standing in a ring;
            default all.
    """

    def __init__(self, reward: PairwiseReward | Reward, opponents: int | None = None) -> None:
        self.reward, self.opponents = as_judge(reward), opponents
        self.name = f"win_rate({self.reward.name})"
        self.spec = replace(spec_of(self.reward), kind="group", differentiable=False)

    def advance(self, progress: float) -> None:
        """As `Composition.advance`."""
        advance(self.reward, progress)

    def __call__(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> Scores:
        pairs = [pair for members in groups(prompts, metadata) for pair in self._pairs(members)]
        if not pairs:
            return Scores(torch.full((len(samples),), 0.5))
        both = pairs + [(b, a) for a, b in pairs]
        verdicts = self.reward.compare(
            [samples[a] for a, _ in both],
            [samples[b] for _, b in both],
            [prompts[a] for a, _ in both],
            [metadata[a] for a, _ in both],
        )
        if verdicts.value.shape != (len(both),):
            raise RewardError(f"'{self.reward.name}' returned {verdicts.value.numel()} values for {len(both)} pairs")
        games = torch.tensor(both)
        parts = {
            name: mean_of_games(games, part, part if name == UNPARSED else 1 - part, len(samples), torch.nan)
            for name, part in verdicts.parts.items()
        }
        return Scores(mean_of_games(games, verdicts.value, 1 - verdicts.value, len(samples), 0.5), parts)

    def _pairs(self, members: list[int]) -> Iterator[tuple[int, int]]:
        """Each pair once, of members at most `opponents` apart when the group stands in a ring."""
        count = len(members)
        for i, j in combinations(range(count), 2):
            if min(j - i, count - (j - i)) <= (self.opponents or count):
                yield members[i], members[j]


def mean_of_games(games: Tensor, first: Tensor, second: Tensor, count: int, alone: float) -> Tensor:
    """[count] the mean of what each sample got in its games; NaN is left out, and `alone` is for samples without any.

    Args:
        games: [G, 2] the two samples of each.
        first, second: [G] what they got.
    """
    got = torch.stack([first, second], dim=1).flatten()
    known = ~got.isnan()
    sums = torch.zeros(count).index_add_(0, games.flatten()[known], got[known])
    games_played = games.flatten()[known].bincount(minlength=count)
    return torch.where(games_played > 0, sums / games_played.clamp(min=1), alone)
