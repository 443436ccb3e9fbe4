"""What samples with a policy, whoever scores and learns: all that an algorithm's `rollout` is given."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowalign.config import BaseConfig
from flowalign.data.batches import Batch
from flowalign.policies.base import Policy


class Sampler:
    """Samples with one process's policy; a subclass for each kind of samples."""

    config: BaseConfig
    policy: Policy

    def __init__(self, config: BaseConfig, policy: Policy) -> None:
        self.config, self.policy = config, policy
        self.shown = False
        """People look at the samples of this iteration."""

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
