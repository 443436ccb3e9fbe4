"""CRD: centred reward distillation (arXiv 2603.14128).

How much less a sample's error is under the policy than under `old` is the policy's implicit reward of it. Differences
of implicit rewards within a group are fitted to the rewards': what all members share, and with it the unknown
normaliser of the KL-regularised optimum, drops out. Samples come from a snapshot of its own, `sampling`; the policy is
held to the start weights *with* guidance, the more the better the sample, so that guidance is distilled into it.

Departure: means are over the group, as in the paper; the authors' code takes them over all samples of a micro-batch.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from flowalign.algorithms.matching.advantage import AdvantageMatching, AdvantageSettings
from flowalign.algorithms.matching.base import Points
from flowalign.core.matching import adaptive_square, optimality
from flowalign.policies.settings import Snapshot


class CRDSettings(AdvantageSettings):
    beta: float = Field(1.0, gt=0)
    """Factor of the implicit rewards."""
    objective: Literal["mse", "bce"] = "mse"
    """Loss that compares centred implicit rewards with centred rewards."""
    adaptive: bool = True
    """Divide each squared error by the mean size of its own elements."""
    temperature: float | None = Field(None, gt=0)
    """Softmax temperature of rewards by which groups are centred, on the good and on the bad; null: on the mean."""
    advantage_max: float = Field(5.0, gt=0)
    """The advantage that counts as entirely good; advantages are clipped there."""
    kl_weight: float = Field(0.1, ge=0)
    """Weight of the mean squared difference from the start weights' velocity, for an entirely good sample."""
    least_kl_weight: float = Field(1e-4, ge=0)
    """The same weight for an entirely bad sample."""
    reference_guidance: float | None = Field(4.5, ge=1)
    """Classifier-free scale of the reference's velocity."""
    old: Snapshot = Snapshot(decay="0-0.25-0.005-0.999")
    """Snapshot that implicit rewards refer to."""
    sampling: Snapshot = Snapshot(decay="75-0-0.0075-0.999")


class CRD(AdvantageMatching):
    """CRD: implicit rewards fitted to rewards, both centred in their group (arXiv 2603.14128)."""

    name = "crd"
    Settings = CRDSettings
    settings: CRDSettings
    compares = frozenset({"old"})
    whole_groups = True

    @property
    def snapshots(self) -> Mapping[str, Snapshot]:
        return {"old": self.settings.old, "sampling": self.settings.sampling}

    @property
    def sampling_weights(self) -> str:
        return "sampling"

    def loss(self, points: Points) -> tuple[Tensor, dict[str, Tensor]]:
        settings = self.settings
        assert points.old is not None
        implicit = self.error(points, points.old) - self.error(points, points.velocity)
        gain, good = points.of_item(settings.beta * implicit), points.of_item(self.goodness(points))
        distances = torch.stack([self.distance(gain, good, weights) for weights in self.weights(good)])
        loss = settings.advantage_max / settings.beta * distances.mean(0).flatten()
        return loss, {"crd/implicit_reward": implicit}

    def goodness(self, points: Points) -> Tensor:
        """[N] rewards in [0, 1]."""
        return optimality(points.advantage, self.settings.advantage_max)

    def error(self, points: Points, velocity: Tensor) -> Tensor:
        """[N] errors of velocities."""
        if self.settings.adaptive:
            return adaptive_square(velocity - points.noised.velocity)
        return points.noised.error(velocity)

    def weights(self, good: Tensor) -> list[Tensor]:
        """[groups, size] of the members whose mean is the centre, once or twice."""
        if self.settings.temperature is None:
            return [torch.full_like(good, 1 / good.shape[1])]
        return [(sign * good / self.settings.temperature).softmax(1) for sign in (1, -1)]

    def distance(self, gain: Tensor, good: Tensor, weights: Tensor) -> Tensor:
        """[groups, size] of implicit rewards from rewards, each from its weighted mean."""
        gain, good = (values - (weights * values.detach()).sum(1, keepdim=True) for values in (gain, good))
        if self.settings.objective == "bce":
            return F.binary_cross_entropy_with_logits(gain, good.sigmoid(), reduction="none")
        return (gain - good) ** 2

    def divergence(self, points: Points) -> Tensor:
        least = self.settings.least_kl_weight / self.settings.kl_weight
        return (least + self.goodness(points) * (1 - least)) * super().divergence(points)
