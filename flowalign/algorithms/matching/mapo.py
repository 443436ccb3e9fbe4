"""MaPO: margin-aware preference optimisation, without a reference (arXiv 2406.06424).

Loss: the chosen picture's error, minus beta times log sigmoid(T * (f(e_chosen) - f(e_rejected))), where
f(e) = c * e / (exp(c * e) - 1) falls from 1 as the error e grows: f stands for a probability, and T for the number of
training timesteps that it is one of. Near 0 it is 1 - c * e / 2.
"""

from pydantic import Field
from torch import Tensor

from flowalign.algorithms.matching.base import Points
from flowalign.algorithms.matching.pairs import PairMatching, PairSettings, won
from flowalign.core.step_losses import preference_loss

SCALE = 0.5
"""c, the authors' "signal-to-noise" value"""
TIMESTEPS = 1000


class MaPOSettings(PairSettings):
    beta: float = Field(0.1, gt=0)
    """Factor of the margin; published: 0.1 for SDXL."""


class MaPO(PairMatching):
    """MaPO: preferences without a reference, by the margin of the errors' likelihoods (arXiv 2406.06424)."""

    name = "mapo"
    Settings = MaPOSettings
    settings: MaPOSettings

    def loss(self, points: Points) -> tuple[Tensor, dict[str, Tensor]]:
        chosen, rejected = points.error.chunk(2)
        logit = TIMESTEPS * (likelihood(chosen) - likelihood(rejected))
        return chosen + self.settings.beta * preference_loss(logit), {
            "preference/accuracy": won(logit),
            "preference/logit": logit,
        }


def likelihood(error: Tensor) -> Tensor:
    """f(e) of errors > 0."""
    return SCALE * error / (SCALE * error).expm1()
