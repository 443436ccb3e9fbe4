"""DRAGON: own samples in two sets, the better of which is made more probable (arXiv 2504.15217).

After the abstract: there is no training code. The samples of a group make pairs, one of each for D+ and one for D-. By
a reward of single samples the better one goes to D+. By a reward of sets (`kind: set`, such as a distance to exemplars
or a diversity) the two change places where D+ as a whole then scores higher; what that is worth is the pair's reward.

Assumed: the sets are an iteration's, of one process; pairs are tried once, in their order; the loss is Diffusion-DPO's
(2311.12908) on each pair, and pairs that are worth nothing are left out.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms.matching.base import Points
from flowalign.algorithms.matching.online import OnlineMatching, OnlineSettings
from flowalign.config import Config, Named
from flowalign.core.groups import group_advantage
from flowalign.core.record import Record
from flowalign.core.step_losses import preference_loss
from flowalign.data.batches import Batch
from flowalign.errors import ConfigError
from flowalign.rollouts.scoring import Scorer
from rewards import Scores, SetReward, spec_of
from rewards import score as scored


class DRAGONSettings(OnlineSettings):
    levels: Named = Named(name="logit_normal", count=2)
    """Name in `flowalign list levels`, with its settings."""
    levels_of: Literal["group", "batch"] = "group"
    """Unit that has noise levels of its own."""
    noise_of: Literal["group"] = "group"
    beta: float = Field(2000.0, gt=0)
    """Factor of the squared error's mean over elements."""


class DRAGON(OnlineMatching):
    """DRAGON: own samples in a better and a worse set, by rewards of samples or sets (arXiv 2504.15217)."""

    name = "dragon"
    Settings = DRAGONSettings
    settings: DRAGONSettings
    compares = frozenset({"reference"})
    whole_groups = True

    def check(self, config: Config) -> None:
        super().check(config)
        if config.training.group_size % 2:
            raise ConfigError("training.group_size: 'dragon' makes pairs of a group's samples; an even number works")

    def score(self, scorer: Scorer, samples: Sequence[Any], batch: Batch) -> Scores:
        if spec_of(scorer.reward).kind != "set":
            return scorer.score(samples, batch)
        rows = torch.arange(len(batch)).view(len(set(batch.group)), 2, -1)
        better, worse = (rows[:, half].flatten().tolist() for half in (0, 1))
        value = self.of_sets(scorer, samples, batch)
        worth, reached = torch.zeros(len(batch)), value(better)
        for pair in range(len(better)):
            tried = [*better[:pair], worse[pair], *better[pair + 1 :]]
            gain = value(tried) - reached
            if gain > 0:
                better, worse[pair], reached = tried, better[pair], reached + gain
            worth[better[pair]], worth[worse[pair]] = abs(gain) / 2, -abs(gain) / 2
        return Scores(worth, {"set": torch.full_like(worth, reached)})

    @staticmethod
    def of_sets(scorer: Scorer, samples: Sequence[Any], batch: Batch) -> Callable[[list[int]], float]:
        """The score of a set of these samples, by their numbers."""
        reward = scorer.reward
        if isinstance(reward, SetReward):
            features = reward.features(samples)
            scorer.calls += len(samples)
            return lambda members: reward.of_set(features[members])

        def value(members: list[int]) -> float:
            scorer.calls += len(members)
            prompts, metadata = [batch.prompts[i] for i in members], scorer.metadata(batch, members)
            return float(scored(reward, [samples[i] for i in members], prompts, metadata).value.mean())

        return value

    def chosen(self, reward: Tensor, batch: Batch) -> Tensor:
        """[groups, M] the half of each group that is in D+, then their partners in D-."""
        halves = torch.arange(len(batch), device=reward.device).view(len(set(batch.group)), 2, -1)
        first, second = halves.unbind(1)
        swap = reward[second] > reward[first]
        return torch.cat([torch.where(swap, second, first), torch.where(swap, first, second)], 1)

    def kept(self, record: Record) -> Tensor:
        return self.credit(record) != 0

    def credit(self, record: Record) -> Tensor:
        return group_advantage(record.reward, record.group, scale="none")

    def loss(self, points: Points) -> tuple[Tensor, dict[str, Tensor]]:
        better, worse = points.of_item(points.error_reference - points.error).chunk(2, 1)
        rewards = points.of_item(points.reward).chunk(2, 1)
        logit = self.settings.beta / 2 * (better - worse)
        told_apart = (rewards[0] > rewards[1]).float()
        loss = (preference_loss(logit) * told_apart).mean(1)
        return loss, {"preference/accuracy": (logit > 0).float().mean(1), "dragon/told_apart": told_apart.mean(1)}
