"""DGPO: direct group preference optimization (arXiv 2510.08425).

A group is a preference between its good and its bad members, each weighed by its advantage. The group's weight is the
chance that the policy, compared with the reference, has the preference the wrong way round; the gradient is that
weight times the advantage-weighted matching error. All members share their noise, and all groups their levels.

A sample that has moved far enough from `old`, by its errors' ratio, has no gradient of its own, but still counts in
its group's weight.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms.matching.advantage import AdvantageMatching, AdvantageSettings
from flowalign.algorithms.matching.base import Points
from flowalign.config import Named
from flowalign.core.step_losses import group_preference_loss, has_moved
from flowalign.policies.settings import Snapshot


class DGPOSettings(AdvantageSettings):
    levels: Named = Named(name="schedule", count=4, end=7)
    """Name in `flowalign list levels`, with its settings; published: 4 of the first 7 of 10 steps, for GenEval of 5."""
    levels_of: Literal["sample", "group", "batch"] = "batch"
    """Unit that has noise levels of its own."""
    noise_of: Literal["sample", "group"] = "group"
    """Unit that has noise of its own, at each level."""
    beta: float = Field(100.0, gt=0)
    """Sharpness of a group's weight, which falls from 1 to 0; published: 100, PickScore 10, with `against` 2000."""
    against: Literal["reference", "old"] = "reference"
    """Weights whose errors the policy's are compared with in a group's weight."""
    clip_range: float | None = Field(1e-2, gt=0)
    """Clip of a sample's ratio exp(e_old - e); null: none; published: 0.05, OCR and GenEval 0.01, without guidance
    0.001, `against: old` 0.00001."""
    kl_weight: float = Field(0.02, ge=0)
    """Weight of the mean squared difference from the start weights' velocity; published: 0.02, 0.001 for PickScore."""
    old: Snapshot = Snapshot(decay="0-0-0.001-0.3", every="update")
    """Average close to the policy, `ema_ref` in the authors' code."""
    switch_after: int = Field(200, ge=0)
    """Updates during which the policy samples; then `old` does; published: 200, 500 for GenEval."""


class DGPO(AdvantageMatching):
    """DGPO: whole groups as preferences, any sampler (arXiv 2510.08425)."""

    name = "dgpo"
    Settings = DGPOSettings
    settings: DGPOSettings
    compares = frozenset({"old", "reference"})
    whole_groups = True
    only_advantages = True

    @property
    def snapshots(self) -> Mapping[str, Snapshot]:
        return {"old": self.settings.old}

    @property
    def sampling_weights(self) -> str:
        return "old" if self.updates > self.settings.switch_after else "policy"

    def loss(self, points: Points) -> tuple[Tensor, dict[str, Tensor]]:
        settings, advantage = self.settings, points.advantage
        still = torch.zeros_like(advantage, dtype=torch.bool)
        if settings.clip_range is not None:
            still = has_moved(points.error, points.error_old, advantage, settings.clip_range)
        other = points.error_old if settings.against == "old" else points.error_reference
        loss, weight = group_preference_loss(points.error, other, advantage, points.size, settings.beta, still)
        return loss, {"dgpo/weight": weight, "policy/clip_fraction": still.float()}
