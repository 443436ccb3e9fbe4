"""On-policy distillation: the student's own states, the teacher's step there (DiffusionOPD, arXiv 2605.15055).

The student samples, and at each of its states its step is drawn to the teacher's: ||mu - mu_teacher||^2 / 2, over the
variance too where steps are stochastic; `weight: velocity` takes the mean squared difference of the velocities.
"""

from typing import Literal

import torch
from torch import Tensor

from flowalign.algorithms.matching import base
from flowalign.algorithms.matching.teachers import TaughtMatching, TaughtSettings
from flowalign.core.divergences import velocity_mse


class OPDSettings(TaughtSettings):
    weight: Literal["step", "velocity"] = "step"
    """Quantity that is compared: steps, or velocities."""


class OPD(TaughtMatching):
    """On-policy distillation from one or several teachers, at the student's own states (arXiv 2605.15055)."""

    name = "opd"
    Settings = OPDSettings
    settings: OPDSettings

    def loss(self, points: base.Points) -> tuple[Tensor, dict[str, Tensor]]:
        assert points.taught is not None
        gap = velocity_mse(points.velocity, points.taught)
        if self.settings.weight == "velocity":
            return gap, {"distillation/gap": gap}
        step, taught = self.step(points, points.velocity), self.step(points, points.taught)
        variance = torch.where(step.std > 0, step.std**2, 1)
        return ((step.mean - taught.mean) ** 2 / (2 * variance)).flatten(1).mean(1), {"distillation/gap": gap}
