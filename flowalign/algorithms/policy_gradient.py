"""Policy gradients over denoising steps and over tokens: an iteration, with advantage and loss of the core by name.

The defaults are a method's published parts. `advantage: {name: ...}` and `loss: {name: ...}` put others in their place,
with the settings given; without a name they change the default's settings: `loss: {clip_range: 1.0e-3}`.
"""

import contextlib
import inspect
import time
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms import base
from flowalign.algorithms.base import ConfigT, PolicyT
from flowalign.config import Named
from flowalign.core.losses import LOOKS_AT, LooksAt
from flowalign.core.off_policy import Level, Rule, correction
from flowalign.core.record import Actions, Record, masked_mean
from flowalign.core.seams import MissingMethod, check_shape, checked_loss
from flowalign.errors import ConfigError, nearest
from flowalign.rollouts.processes import Processes
from flowalign.rollouts.sampler import Sampled, SamplerT
from flowalign.rollouts.scoring import score_metrics
from rewards import Scores


class OffPolicy(base.AlgorithmSettings):
    """See `core.off_policy.correction`; costs a forward pass of every action."""

    level: Level = "token"
    """Unit of the ratio; 'token': each action, be it a token or a denoising step."""
    rule: Rule = "truncate"
    largest: float = Field(2.0, gt=0)
    smallest: float = Field(0.0, ge=0)


class PolicyGradientSettings(base.AlgorithmSettings):
    """Settings that all have; a family and its methods add their own."""

    advantage: Named
    """Name in `flowalign list advantages`, with its settings."""
    loss: Named
    """Name in `flowalign list losses`, with its settings."""
    kl_weight: float = Field(0.0, ge=0)
    """Weight of the divergence from the start weights, or from `kl_reference`."""
    kl_reference: str = "reference"
    """Weights that the divergence refers to: the start weights, or a snapshot that follows (`training.snapshots`)."""
    off_policy: OffPolicy | None = None
    """Weigh actions by their probability under the current over the sampling weights; ratios refer to the current."""

    moved: ClassVar[dict[str, str]] = {
        "clip_range": "loss: {clip_range: ...}",
        "clip_range_high": "loss: {clip_range_high: ...}",
        "dual_clip": "loss: {dual_clip: ...}",
        "advantage_scale": "advantage: {scale: ...}",
        "advantage_clip": "advantage: {clip: ...}",
        "combine": "advantage: {name: per_reward} or {name: gdpo}",
        "kl_estimator": "kl_estimate",
    }


class RecordedActions(Protocol):
    """A rollout with the log-probabilities of its actions."""

    @property
    def mask(self) -> Tensor:
        """[B, T] bool: the actions that were drawn."""

    @property
    def log_prob(self) -> Tensor:
        """[B, T] log-probabilities when they were drawn."""


ActionsT = TypeVar("ActionsT", bound=RecordedActions)


@dataclass(kw_only=True)
class ActionExperience(base.Experience):
    """One process's trajectories of an iteration, and what each action earned."""

    rollout: Any
    scores: Scores
    reward: Tensor
    """[B] reward behind the advantages: the score, where every action has a reward of its own."""
    group: Tensor
    """[B]"""
    advantage: Tensor
    """[B, T]"""
    loss_weight: Tensor
    """[B, T] weight of each action's loss."""
    divergence_weight: Tensor
    """[B, T] weight of each action's divergences, which are part of every loss."""
    all_teach: bool = False
    """Whether the loss has more terms than advantages give."""
    teacher: Tensor | None = None
    """[B, T] log-probabilities under a teacher, where there is one"""
    drops_rows: bool = False
    """Whether rows that earned nothing leave the loss with all its terms."""

    def outcome(self) -> tuple[Tensor, Tensor]:
        return self.scores.value, masked_mean(self.advantage.abs(), self.rollout.mask)[: len(self.batch)]

    def useful(self, items: Tensor) -> Tensor | None:
        if self.all_teach:
            return None
        teaches = (self.advantage * self.loss_weight)[items.unbind(1)] != 0
        return teaches.view(len(items), -1).any(1)

    def counted(self, items: Tensor) -> Tensor | None:
        if not self.drops_rows:
            return None
        return (self.advantage * self.loss_weight).any(1)[items[:, 0]]

    def size(self, items: Tensor) -> Tensor:
        return (self.advantage * self.loss_weight)[items.unbind(1)].abs().view(len(items), -1).mean(1)

    @property
    def fresh(self) -> Tensor:
        """[B] bool: sampled by the current weights, not kept from an earlier iteration."""
        return torch.tensor(self.batch.picks, device=self.advantage.device) >= 0


class PolicyGradient(
    base.Algorithm[ConfigT, SamplerT, PolicyT, ActionsT, Record, ActionExperience],
    Generic[ConfigT, SamplerT, PolicyT, ActionsT],
):
    """Base of the trajectory family and of the language models' algorithms.

    A method answers how to sample (`rollout`), what the samples are worth (`score`), which reward every action gets
    (`step_reward`), how rewards become advantages (`credit`), and what the loss of an action is.
    """

    settings: PolicyGradientSettings
    headline = "reward/mean"
    combines = base.Algorithm.combines | {"refill", "replay", "ratios", "passes", "advantages", "workers", "served"}
    fields: ClassVar[frozenset[str]] = frozenset({"rewards"})
    """Fields of its record that an advantage may need and not every rollout has."""
    dense: ClassVar[bool] = False
    """Whether every action has a reward of its own."""
    piece: ClassVar[LooksAt] = "action"
    """Largest piece of a trajectory that one call of the loss gets."""

    def __init__(self, settings: PolicyGradientSettings) -> None:
        super().__init__(settings)
        method = type(self).__name__
        self.advantage_of = settings.advantage.part("advantages", "algorithm.advantage")
        self.loss_of = settings.loss.part("losses", "algorithm.loss")
        self.loss_looks_at: LooksAt = getattr(self.loss_of, "looks_at", "action")
        advantage = f"algorithm.advantage: '{settings.advantage.name}'"
        missing: frozenset[str] = getattr(self.advantage_of, "needs", frozenset()) - self.fields
        if missing:
            raise ConfigError(
                f"{advantage} needs {', '.join(sorted(missing))}, which {method} does not record; grpo works"
            )
        if self.dense and not getattr(self.advantage_of, "dense", False):
            raise ConfigError(f"{advantage} takes one reward a row, and {method} has one for every action; grpo works")
        if LOOKS_AT.index(self.loss_looks_at) > LOOKS_AT.index(self.piece):
            raise ConfigError(
                f"algorithm.loss: '{settings.loss.name}' looks at a whole {self.loss_looks_at} at once, and {method} "
                f"shows it one {self.piece} at a time; ppo works"
            )

    def check(self, config: ConfigT) -> None:
        named, known = self.settings.kl_reference, ["reference", *config.training.snapshots]
        if named not in known:
            raise ConfigError(f"algorithm.kl_reference: no snapshot '{named}'; {nearest(named, known)}")
        if named != "reference" and self.settings.kl_weight == 0:
            raise ConfigError("algorithm.kl_reference: the loss has no divergence; set algorithm.kl_weight too")
        if self.settings.off_policy is not None and (config.data.dynamic_sampling or config.data.replay):
            raise ConfigError("algorithm.off_policy: weighs one rollout; data.dynamic_sampling and replay go without")

    @property
    def uses_reference(self) -> bool:
        return self.settings.kl_weight > 0 and self.settings.kl_reference == "reference"

    def referred(self, policy: PolicyT) -> contextlib.AbstractContextManager[None]:
        """Context in which the policy has the weights that the divergence refers to."""
        name = self.settings.kl_reference
        return policy.reference() if name == "reference" else policy.snapshot(name)

    def needs(self, field: str) -> bool:
        """Whether the advantage needs this field of the record."""
        return field in getattr(self.advantage_of, "needs", ())

    def experience(
        self, sampled: Sampled[SamplerT, ActionsT], record: Record, processes: Processes
    ) -> ActionExperience:
        """The trajectories with what each action earned."""
        rollout, batch, scores = sampled.rollout, sampled.batch, sampled.scores
        advantage = self.advantages(record)
        loss_weight, divergence_weight = self.weights(sampled.sampler, record)
        metrics = score_metrics(scores, record.group, processes) | self.record_metrics(record)
        length = rollout.mask.shape[1]

        def own(values: Tensor) -> Tensor:
            return processes.own(values, len(batch))

        experience = ActionExperience(
            batch=batch,
            metrics=metrics,
            items=self.items_of(rollout),
            rollout=rollout,
            scores=scores,
            reward=own(record.reward) if record.reward.dim() == 1 else scores.value.to(record.reward.device),
            group=own(record.group),
            advantage=own(advantage)[:, :length],
            loss_weight=own(loss_weight)[:, :length],
            divergence_weight=own(divergence_weight)[:, :length],
            all_teach=self.loss_looks_at == "group" or self.settings.kl_weight > 0,
        )
        off_policy = self.settings.off_policy
        if off_policy is not None:
            assert sampled.sampler_log_prob is not None
            ratio = correction(rollout.log_prob, sampled.sampler_log_prob, rollout.mask, **off_policy.model_dump())
            experience.loss_weight = experience.loss_weight * ratio
            mean = masked_mean(ratio.expand_as(rollout.mask), rollout.mask)
            metrics["policy/off_policy_weight"] = processes.gather(mean).mean().item()
        return experience

    def rescored(self, sampler: SamplerT, rollout: ActionsT) -> ActionsT:
        """The trajectories, with log-probabilities of the current weights."""
        raise MissingMethod(self, "rescored")

    def step_reward(self, sampled: Sampled[SamplerT, ActionsT], processes: Processes) -> Tensor:
        """[B] or [B, T] rewards; here the finished sample's, one a trajectory."""
        reward: Tensor = sampled.scores.value
        missing = sampled.scores.missing
        return reward if missing is None else reward.masked_fill(missing.to(reward.device), torch.nan)

    def record(self, sampled: Sampled[SamplerT, ActionsT], processes: Processes) -> Record:
        """The record of all processes."""
        if self.settings.off_policy is not None:
            sampled.sampler_log_prob = sampled.rollout.log_prob
            sampled.rollout = self.rescored(sampled.sampler, sampled.rollout)
        begin = time.perf_counter()
        reward = self.step_reward(sampled, processes)
        if type(self).credit is PolicyGradient.credit:  # a credit of its own may read rewards of another shape
            shapes = sampled.scores.value.shape, sampled.rollout.mask.shape
            check_shape(f"{type(self).__name__}.step_reward", reward, *shapes)
        seconds = sampled.metrics.get("seconds/reward", 0.0)
        sampled.metrics["seconds/reward"] = seconds + time.perf_counter() - begin
        return self.gathered(sampled, reward, processes)

    @abstractmethod
    def gathered(self, sampled: Sampled[SamplerT, ActionsT], reward: Tensor, processes: Processes) -> Record:
        """The record of all processes.

        Args:
            reward: [B] or [B, T] of this process's samples.
        """

    def credit(self, record: Record) -> Tensor:
        """[B] or [B, T] advantages from the record of all processes."""
        advantage: Tensor = self.advantage_of(record)
        return advantage

    def advantages(self, record: Record) -> Tensor:
        """[B, T] what each action earned; 0 where none was drawn."""
        advantage = self.credit(record)
        source = f"{type(self).__name__}.credit (algorithm.advantage: '{self.settings.advantage.name}')"
        check_shape(source, advantage, record.group.shape, record.mask.shape)
        if advantage.dim() == 1:
            advantage = advantage[:, None].expand_as(record.mask)
        if record.reward.dim() == 1:
            # no reward applied to it
            advantage = advantage.where(~record.reward.isnan()[:, None], 0)
        if record.confidence is not None:
            advantage = advantage * record.confidence[:, None]
        return advantage.where(record.mask, 0)

    def named_loss(self, actions: Actions) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss that the settings name, of each action, and named values for the metrics."""
        source = f"algorithm.loss: '{self.settings.loss.name}'"
        return checked_loss(source, self.loss_of(actions), actions.log_prob.shape)

    def weights(self, sampler: SamplerT, record: Record) -> tuple[Tensor, Tensor]:
        """[B, T] weights of the actions' policy losses, and [B, T] of their divergences."""
        ones = torch.ones_like(record.log_prob)
        return ones, ones

    def record_metrics(self, record: Record) -> dict[str, float]:
        """Metrics of the record."""
        return {}

    @abstractmethod
    def items_of(self, rollout: ActionsT) -> Tensor:
        """[N, ...] what is learned from in one piece, as of `ActionExperience`."""

    def verify(self, policy: PolicyT, experience: ActionExperience) -> None:
        policy.verify(experience.rollout)

    @cached_property
    def clip_range(self) -> float | None:
        """Distance of a ratio from 1 at which the loss clips it, on the narrower side; None where it does not."""
        parameters = inspect.signature(self.loss_of, follow_wrapped=False).parameters
        ranges = [parameters[name].default for name in ("clip_range", "clip_range_high") if name in parameters]
        return min((limit for limit in ranges if limit is not None), default=None)

    def replays_old(self, config: ConfigT) -> bool:
        """Whether ratios refer to a replay where `training.old_log_prob` does not say."""
        return False

    @abstractmethod
    def few(self, experience: ActionExperience) -> Tensor:
        """Items enough to compare a replay with the rollout by; as many on every process."""

    @abstractmethod
    def replay(self, policy: PolicyT, experience: ActionExperience, items: Tensor, keep: bool) -> Tensor:
        """Log-ratios of items between a replay and what ratios refer to, which before any update should be 0.

        Args:
            keep: from now on ratios refer to the replay.

        Returns:
            [N, K], K places of an action in its row of which the metrics speak; NaN where an item has none, and for
            rows that earlier weights sampled.
        """
