"""Reward-weighted regression on the policy's own samples.

ORW-CFM-W2 (arXiv 2502.06061): each sample's matching error weighs exp(beta r), and the squared distance of the
velocity from the start weights' bounds the Wasserstein-2 distance from them. Flow-RWR (2501.13918) is `beta: 1`;
Flow-GRPO's code weighs by the reward itself. Weights are not normalised, so that rewards should be bounded.

With beta 0 it is flow matching on its own samples; the larger beta, the more it is fine-tuning on the best ones.
"""

from typing import Literal

from pydantic import Field
from torch import Tensor

from flowalign.algorithms.matching.base import Points
from flowalign.algorithms.matching.online import OnlineMatching, OnlineSettings
from flowalign.core.record import Record


class RWRSettings(OnlineSettings):
    weight: Literal["exp", "reward"] = "exp"
    """Weight of a sample: exp(beta r), or its reward."""
    beta: float = Field(0.5, ge=0)
    """Sharpness of the weight; published: 0.5 for ORW-CFM-W2, 1 for Flow-RWR."""
    kl_weight: float = Field(1.0, ge=0)
    """Weight of the mean squared difference from the start weights' velocity; published: 1, Flow-GRPO 100."""


class RWR(OnlineMatching):
    """Reward-weighted flow matching on own samples (arXiv 2502.06061, 2501.13918)."""

    name = "rwr"
    Settings = RWRSettings
    settings: RWRSettings
    only_advantages = True

    def credit(self, record: Record) -> Tensor:
        return record.reward if self.settings.weight == "reward" else (self.settings.beta * record.reward).exp()

    def loss(self, points: Points) -> tuple[Tensor, dict[str, Tensor]]:
        return points.advantage * points.error, {"rwr/weight": points.advantage}
