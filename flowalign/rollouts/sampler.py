"""What samples with a policy, whoever scores and learns: all that an algorithm's `rollout` is given."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from flowalign.config import BaseConfig
from flowalign.data.batches import Batch
from flowalign.policies.base import Policy
from flowalign.rollouts.processes import Processes
from flowalign.rollouts.scoring import Scorer
from samplers import derive_seed


class Sampler:
    """Samples with one process's policy; a subclass for each kind of samples."""

    config: BaseConfig
    policy: Policy

    def __init__(self, config: BaseConfig, policy: Policy) -> None:
        self.config, self.policy = config, policy
        self.shown = False
        """People look at the samples of this iteration."""
        self.metrics: dict[str, float] = {}
        """Metrics of sampling in this iteration."""

    @property
    def device(self) -> torch.device:
        return self.policy.device

    def rollout(self, batch: Batch) -> Any:
        """A trajectory of every sample of the batch."""
        raise NotImplementedError

    def decode(self, rollout: Any, shown: bool = False) -> list[Any]:
        """The finished samples of a rollout, as the reward needs them.

        Args:
            shown: people look at them.
        """
        raise NotImplementedError

    def cat(self, rollouts: Sequence[Any]) -> Any:
        """Several rollouts as one."""
        raise NotImplementedError

    def restore(self, tensors: dict[str, Tensor], rest: dict[str, Any], batch: Batch) -> Any:
        """The rollout of the batch's samples of which `packed` made these."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """What adapts while it samples, for the checkpoint, as JSON."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""


SamplerT = TypeVar("SamplerT", bound=Sampler)
RolloutT = TypeVar("RolloutT")


@dataclass(kw_only=True)
class Sampled(Generic[SamplerT, RolloutT]):
    """What was sampled of whole groups on this process, and by whom."""

    rollout: RolloutT
    batch: Batch
    scores: Any = None
    """`Scores` of the finished samples; None where the algorithm does not have them scored."""
    sampler: SamplerT
    """Sampler of these samples, for further states or samples."""
    scorer: Scorer
    """Scorer of these samples, for further ones."""
    sampler_log_prob: Tensor | None = None
    """[B, T] log-probabilities as sampled, where the current weights scored the rollout again."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of sampling and scoring."""

    def gathered(self, processes: Processes) -> dict[str, Any]:
        """The fields that records of all kinds have, of all processes."""
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
