"""Pref-GRPO: pairwise preferences in the place of scores (arXiv 2508.20751).

Credit: a judge compares the pictures of a group two by two; a member's reward is its win rate, a tie or an unreadable
verdict half a win; win rates are normalised within the group. With `win_rate_weight` the win rate is one reward of
several, as in the authors' code (.4 of it, .6 CLIP, by the advantage `gdpo`). Comparing every pair costs G (G - 1) / 2
verdicts; a single-elimination tournament (ArenaRL, arXiv 2601.06487) or one random opponent (BRPO) cost about G. Judges
prefer a side: `both_orders` asks twice. Rollout and loss are Flow-GRPO's.
"""

from collections.abc import Sequence
from typing import Any

import torch
from PIL.Image import Image
from pydantic import Field
from torch import Tensor

from flowalign import registry
from flowalign.algorithms.trajectory import base as trajectory
from flowalign.algorithms.trajectory.base import TrajectoryAlgorithm
from flowalign.config import Config
from flowalign.core.record import Record
from flowalign.data.batches import Batch
from flowalign.errors import ConfigError
from flowalign.rollouts.pictures import SampledPictures
from flowalign.rollouts.processes import Processes
from flowalign.rollouts.scoring import Scorer
from rewards import UNPARSED, PairwiseReward, Scores
from rewards.pairwise import Games, Schedule, as_judge, compare


class PrefGRPOSettings(trajectory.PolicySettings):
    judge: dict[str, Any]
    """A pairwise reward, or a pointwise one whose higher score wins: its `name` and settings."""
    schedule: Schedule = "all"
    both_orders: bool = False
    win_rate_weight: float | None = Field(None, gt=0)
    """The win rate's weight among those of `rewards`; null: it is the only reward, `rewards` are only measured."""


class PrefGRPO(TrajectoryAlgorithm):
    """Pref-GRPO: the reward is the win rate in pairwise comparisons within the group (arXiv 2508.20751)."""

    name = "pref_grpo"
    Settings = PrefGRPOSettings
    settings: PrefGRPOSettings
    judge: PairwiseReward | None = None
    games: Games

    def check(self, config: Config) -> None:
        super().check(config)
        if "name" not in self.settings.judge:
            raise ConfigError("algorithm.judge: give the judge's name, e.g. judge: {name: pick_score}")
        arguments = dict(self.settings.judge)
        registry.check("rewards", arguments.pop("name"), arguments, "algorithm.judge")

    def score(self, scorer: Scorer, samples: Sequence[Image], batch: Batch) -> Scores:
        """The reward's scores, with the parts win_rate and, over a sample's comparisons, judge/unparsed."""
        if self.judge is None:
            arguments = dict(self.settings.judge)
            self.judge = as_judge(registry.build("rewards", arguments.pop("name"), arguments, "algorithm.judge"))
        s = self.settings
        scores = scorer.score(samples, batch)
        self.games = Games(self.judge, samples, batch.prompts, batch.metadata)
        scores.parts["win_rate"] = compare(batch.group, self.games, s.schedule, batch.iteration, s.both_orders)
        scorer.calls += 2 * len(self.games.pairs)
        unparsed = self.games.parts().get(UNPARSED, torch.zeros(len(batch)))
        scores.parts["judge/unparsed"] = unparsed.nan_to_num()
        return scores

    def step_reward(self, sampled: SampledPictures, processes: Processes) -> Tensor:
        weight, win_rate = self.settings.win_rate_weight, sampled.scores.parts["win_rate"]
        return win_rate if weight is None else weight * win_rate + sampled.scores.value

    def record(self, sampled: SampledPictures, processes: Processes) -> Record:
        record = super().record(sampled, processes)
        win_rate = processes.gather(sampled.scores.parts["win_rate"].to(processes.device))[None]
        weight = self.settings.win_rate_weight
        if weight is None:
            record.rewards, record.reward_weights = win_rate, torch.ones(1, device=processes.device)
        else:
            record.rewards = torch.cat([win_rate, record.rewards])
            record.reward_weights = torch.cat([record.reward_weights.new_tensor([weight]), record.reward_weights])
        return record

    def wins(self, rows: int) -> Tensor:
        return self.games.table()
