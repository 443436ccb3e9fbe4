"""DanceGRPO: GRPO for diffusion and flow models (arXiv 2505.07818).

Rollout: a rectified-flow SDE with constant diffusion (kernel `dance_sde`, eta 0.3); the group starts from one
noise. Credit: each reward is normalised within its group, advantages are summed (`per_reward`); of a group only the
best and the worst `keep` members are learned from; and of each trajectory only a random share of its steps. Loss: PPO's
clip.
"""

from pydantic import Field
from torch import Tensor

from flowalign.algorithms.trajectory import base as trajectory
from flowalign.algorithms.trajectory.base import TrajectoryAlgorithm
from flowalign.config import Named
from flowalign.core.credit import best_and_worst
from flowalign.core.record import Record, masked_mean


class DanceGRPOSettings(trajectory.PolicySettings):
    advantage: Named = Named(name="per_reward", clip=5.0, unbiased=True, eps=1e-8)
    keep: int | None = Field(None, ge=1)
    """Number of best and of worst members of a group to learn from; default: all."""
    step_fraction: float = Field(0.6, gt=0, le=1)


class DanceGRPO(TrajectoryAlgorithm):
    """DanceGRPO: constant-diffusion SDE, best and worst members, a random share of steps (arXiv 2505.07818)."""

    name = "dance_grpo"
    Settings = DanceGRPOSettings
    settings: DanceGRPOSettings

    def advantages(self, record: Record) -> Tensor:
        advantage = super().advantages(record)
        if self.settings.keep is not None:
            ranked = masked_mean(advantage, record.mask)
            advantage = advantage * best_and_worst(ranked, record.group, self.settings.keep)[:, None]
        return advantage
