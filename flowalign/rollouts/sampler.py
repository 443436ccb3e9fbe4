"""Base of samplers, which draw samples from a policy; an algorithm's `rollout` gets one."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from flowalign.config import BaseConfig
from flowalign.data.batches import Batch
from flowalign.policies.base import Policy
from flowalign.rollouts.processes import Processes
from flowalign.rollouts.scoring import Scorer
from rewards import Scores
from samplers import derive_seed
from samplers.stored import Allocate


class Sampler:
    """Samples with the policy of one process; each kind of samples has a subclass."""

    config: BaseConfig
    policy: Policy

    def __init__(self, config: BaseConfig, policy: Policy) -> None:
        self.config, self.policy = config, policy
        self.shown = False
        """True if people look at the samples of this iteration."""
        self.metrics: dict[str, float] = {}
        """Metrics of sampling in this iteration."""
        self.shares_start_noise = True
        """True if the members of a group have one start noise. A text has none but its draws' own."""
        self.allocate: Allocate | None = None
        """Memory on the host for trajectories; None: they stay on the device."""
        self.overlaps = False
        """True if parts are scored while others are sampled although no setting says so."""

    @property
    def device(self) -> torch.device:
        return self.policy.device

    def rollout(self, batch: Batch) -> Any:
        """Sample a trajectory for every sample of the batch."""
        raise NotImplementedError

    def cuts(self, batch: Batch) -> list[int]:
        """Rows, the first 0, where parts of a batch may begin that have the numbers of the whole to the bit."""
        return [0]

    def decode(self, rollout: Any, shown: bool = False) -> list[Any]:
        """The finished samples of a rollout, as the reward needs them.

        Args:
            shown: True if people look at them.
        """
        raise NotImplementedError

    def cat(self, rollouts: Sequence[Any]) -> Any:
        """Join several rollouts."""
        raise NotImplementedError

    def stored(self, rollout: Any) -> Any:
        """A rollout where it waits for the updates; here where it is."""
        return rollout

    def restore(self, tensors: dict[str, Tensor], rest: dict[str, Any], batch: Batch) -> Any:
        """Rebuild the rollout of the batch's samples from the results of its method `packed`."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """State that adapts while sampling, for the checkpoint, as JSON."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""


SamplerT = TypeVar("SamplerT", bound=Sampler)
RolloutT = TypeVar("RolloutT")


@dataclass(kw_only=True)
class Sampled(Generic[SamplerT, RolloutT]):
    """Samples of whole groups on this process, with their sampler and scorer."""

    rollout: RolloutT
    batch: Batch
    scores: Any = None
    """`Scores` of the finished samples; None if the algorithm needs no scores."""
    sampler: SamplerT
    """Sampler of these samples, for further states or samples."""
    scorer: Scorer
    """Scorer of these samples, for further ones."""
    sampler_log_prob: Tensor | None = None
    """[B, T] log-probabilities at sampling, if the current weights have since replaced those of the rollout."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of sampling and scoring."""

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Samples of several groups as one."""
        sampler = parts[0].sampler
        rollouts = [part.rollout for part in parts if part.rollout is not None]
        scores = [part.scores for part in parts if part.scores is not None]
        rollout: Any = sampler.cat(rollouts) if rollouts else None
        return cls(
            rollout=rollout,
            batch=Batch.cat([part.batch for part in parts]),
            scores=Scores.cat(scores) if scores else None,
            sampler=sampler,
            scorer=parts[0].scorer,
        )

    def gathered(self, processes: Processes) -> dict[str, Any]:
        """The fields that all kinds of records share, gathered from all processes."""
        rewards, weights = self.scorer.separate(self.scores)
        weight, config = self.scores.weight, self.sampler.config
        return {
            "group": processes.gather(torch.tensor(self.batch.group, device=processes.device)),
            "rewards": rewards,
            "reward_weights": weights,
            "names": tuple(named.name for named in config.rewards),
            "seed": derive_seed(config.training.seed, self.batch.iteration, 3),
            "confidence": None if weight is None else processes.gather(weight.to(processes.device)),
        }
