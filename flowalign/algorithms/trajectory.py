"""The trajectory family: policy gradients over the stochastic denoising steps of recorded rollouts.

An algorithm of the family says which reward every step gets (`step_reward`), how rewards become advantages
(`credit`), and the loss of an action (`loss`); what they share is here.
"""

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from flowalign.core.advantages import zero_spread
from flowalign.policies import DiffusersPolicy, Rollout
from rewards import Scores

if TYPE_CHECKING:
    from flowalign.config import Config
    from flowalign.data import Batch
    from flowalign.training.actor import Actor


class Settings(BaseModel):
    """An algorithm's own settings; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid")


@dataclass
class Record:
    """The one record of what happened, over all processes: B trajectories of T actions."""

    log_prob: Tensor
    """[B, T]"""
    mask: Tensor
    """[B, T] bool: the actions that were drawn"""
    reward: Tensor
    """[B], or [B, T] where every action has its own"""
    group: Tensor
    """[B] integers"""


@dataclass
class Actions:
    """N stored actions under the present weights; gradients flow through log_prob and mean."""

    log_prob: Tensor
    """[N]"""
    old_log_prob: Tensor
    """[N]"""
    advantage: Tensor
    """[N]"""
    mean: Tensor
    """[N, ...]"""
    mean_reference: Tensor | None
    """[N, ...], None where the algorithm does not use the reference"""
    std: Tensor
    """[N, 1, ...]"""


@dataclass
class Experience:
    """One process's part of an iteration: its rollout, its scores and what each action earned."""

    rollout: Rollout
    scores: Scores
    advantage: Tensor
    """[B, T]"""
    metrics: dict[str, float]

    def pairs(self) -> Tensor:
        """[N, 2] (sample, step) of every stochastic step, group after group."""
        return self.rollout.trajectory.mask.nonzero()


class TrajectoryAlgorithm(ABC):
    """Base of the family.

    Args:
        settings: the algorithm's own, validated.
    """

    Settings: ClassVar[type[Settings]]

    def __init__(self, settings: BaseModel) -> None:
        self.settings = settings

    @property
    def uses_reference(self) -> bool:
        """Whether the loss compares with the start weights."""
        return False

    def check(self, config: "Config") -> None:
        """Refuse configurations that cannot work with this algorithm, saying what would."""

    def step_reward(self, actor: "Actor", rollout: Rollout, batch: "Batch", scores: Scores) -> Tensor:
        """[B] or [B, T] rewards; here the finished sample's, one a trajectory."""
        return scores.value

    @abstractmethod
    def credit(self, record: Record) -> Tensor:
        """[B] or [B, T] advantages from the record of all processes."""

    @abstractmethod
    def loss(self, actions: Actions) -> tuple[Tensor, dict[str, Tensor]]:
        """[N] loss of each action, and named [N] values for the metrics."""

    def collect(self, actor: "Actor", batch: "Batch") -> Experience:
        """Roll out, score, and give credit."""
        begin = time.perf_counter()
        rollout = actor.rollout(batch)
        images = actor.decode(rollout)
        rolled = time.perf_counter()
        scores = actor.score(images, batch)
        reward = self.step_reward(actor, rollout, batch, scores)
        scored = time.perf_counter()

        trajectory = rollout.trajectory
        record = Record(
            actor.gather(trajectory.log_prob),
            actor.gather(trajectory.mask),
            actor.gather(reward.to(actor.device)),
            actor.gather(torch.tensor(batch.group, device=actor.device)),
        )
        advantage = self.credit(record)
        if advantage.dim() == 1:
            advantage = advantage[:, None].expand_as(record.mask)
        value = actor.gather(scores.value.to(actor.device))
        metrics = {
            "reward/mean": value.mean().item(),
            "reward/std": value.std(correction=0).item(),
            "reward/zero_spread": zero_spread(record.reward, record.group).item(),
            "seconds/rollout": rolled - begin,
            "seconds/reward": scored - rolled,
        }
        for name, part in scores.parts.items():
            metrics[f"reward/{name}"] = actor.gather(part.to(actor.device)).mean().item()
        return Experience(rollout, scores, actor.mine(advantage, len(batch)), metrics)

    def actions(self, policy: DiffusersPolicy, experience: Experience, pairs: Tensor) -> Actions:
        """The stored actions of [N, 2] (sample, step) pairs, scored under the present weights."""
        samples, steps = pairs.unbind(1)
        rollout = experience.rollout
        made = policy.score(rollout, samples, steps)
        mean_reference = None
        if self.uses_reference:
            with torch.no_grad(), policy.reference():
                mean_reference = policy.score(rollout, samples, steps).mean
        return Actions(
            made.log_prob,
            rollout.trajectory.log_prob[samples, steps],
            experience.advantage[samples, steps],
            made.mean,
            mean_reference,
            made.std,
        )
