"""Pref-GRPO: pairwise preferences in the place of scores (arXiv 2508.20751).

Credit: a judge compares the pictures of a group two by two; a member's reward is its win rate, a tie or an unreadable
verdict half a win; win rates are normalised within the group. Comparing every pair costs G (G - 1) / 2 verdicts; a
single-elimination tournament (ArenaRL, arXiv 2601.06487) or one random opponent (BRPO) cost about G. Judges prefer a
side: `both_orders` asks twice. Rollout and loss are Flow-GRPO's.
"""

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from torch import Tensor

from flowalign import registry
from flowalign.algorithms import trajectory
from flowalign.algorithms.trajectory import TrajectoryAlgorithm
from flowalign.core.pairwise import Pair, Schedule, compare, win_table
from flowalign.data import Batch
from flowalign.errors import ConfigError
from flowalign.policies import Rollout
from rewards import Scores
from rewards.preference import as_judge

if TYPE_CHECKING:
    from flowalign.config import Config
    from flowalign.training.actor import Actor


class PrefGRPOSettings(trajectory.PolicySettings):
    judge: dict[str, Any]
    """a pairwise reward, or a pointwise one whose higher score wins: its `name` and settings"""
    schedule: Schedule = "all"
    both_orders: bool = False


class PrefGRPO(TrajectoryAlgorithm):
    """Pref-GRPO: the reward is the win rate in pairwise comparisons within the group (arXiv 2508.20751)."""

    Settings = PrefGRPOSettings
    settings: PrefGRPOSettings
    judge: Any = None
    met: dict[Pair, list[float]]
    """verdicts of the last batch: the first row's share of the win, each time a pair was judged"""

    def check(self, config: "Config") -> None:
        if "name" not in self.settings.judge:
            raise ConfigError("algorithm.judge: give the judge's name, e.g. judge: {name: pick_score}")
        registry.resolve("rewards", self.settings.judge["name"])

    def step_reward(self, actor: "Actor", rollout: Rollout, batch: Batch, scores: Scores) -> Tensor:
        if self.judge is None:
            arguments = dict(self.settings.judge)
            self.judge = as_judge(registry.build("rewards", arguments.pop("name"), arguments, "algorithm.judge"))
        images = actor.decode(rollout)
        self.met = defaultdict(list)

        def verdicts(pairs: list[Pair]) -> list[float]:
            first, second = zip(*pairs, strict=True)
            actor.reward_calls += 2 * len(pairs)
            judged = self.judge.compare(
                [images[i] for i in first],
                [images[i] for i in second],
                [batch.prompts[i] for i in first],
                [batch.metadata[i] for i in first],
            )
            shares: list[float] = judged.value.tolist()
            for pair, share in zip(pairs, shares, strict=True):
                self.met[pair].append(share)
            return shares

        s = self.settings
        return compare(batch.group, verdicts, s.schedule, batch.iteration, s.both_orders)

    def wins(self, rows: int) -> Tensor:
        return win_table(rows, self.met)
