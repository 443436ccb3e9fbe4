"""AWM: advantage-weighted matching (arXiv 2509.25050).

The policy gradient with an error of the forward process in the place of a log-probability: good samples are matched,
bad ones unmatched, in proportion to their advantages. `old` is a close average of the policy that holds it back.

Departure: the authors' ratio exp(l - l_old) and its clip are left out; with one update an iteration, as they run it,
the ratio is 1, the clip does nothing, and the gradient is the one here.
"""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field
from torch import Tensor

from flowalign.algorithms.matching.advantage import AdvantageMatching, AdvantageSettings
from flowalign.algorithms.matching.base import Points
from flowalign.core.divergences import velocity_mse
from flowalign.policies.settings import Snapshot

LEAST_ERROR = 1e-10


class AWMSettings(AdvantageSettings):
    weighting: Literal["uniform", "t", "t**2", "huber", "ghuber"] = "ghuber"
    """Function of the error e at noise level t: e, t e, t^2 e, t sqrt(e), or t e^power / power."""
    power: float = Field(0.25, gt=0)
    advantage_max: float = Field(5.0, gt=0)
    """Advantage that counts as 1; larger ones do too."""
    kl_weight: float = Field(1e-3, ge=0)
    """Weight of the mean squared difference from the start weights; published: 0.001, OCR 0.003, PickScore 0.0001."""
    old_weight: float = Field(1.0, ge=0)
    """Weight of the mean squared difference from the velocity of the snapshot `old`."""
    old: Snapshot = Snapshot(decay="0-0-0.001-0.3")
    """Average close to the policy, `kl_ema` in the authors' code."""


class AWM(AdvantageMatching):
    """AWM: the sample's matching error, weighted by its advantage (arXiv 2509.25050)."""

    name = "awm"
    Settings = AWMSettings
    settings: AWMSettings
    compares = frozenset({"old"})

    @property
    def snapshots(self) -> Mapping[str, Snapshot]:
        return {"old": self.settings.old}

    def loss(self, points: Points) -> tuple[Tensor, dict[str, Tensor]]:
        largest = self.settings.advantage_max
        assert points.old is not None
        moved = velocity_mse(points.velocity, points.old)
        advantage = points.advantage.clamp(-largest, largest) / largest
        return advantage * self.weighted(points) + self.settings.old_weight * moved, {"matching/moved": moved}

    def weighted(self, points: Points) -> Tensor:
        """[N] minus the log-probability that stands for a sample's."""
        error, t, power = points.error, points.noised.sigma, self.settings.power
        if self.settings.weighting == "uniform":
            return error
        if self.settings.weighting == "t":
            return t * error
        if self.settings.weighting == "t**2":
            return t**2 * error
        if self.settings.weighting == "huber":
            return t * ((error + LEAST_ERROR).sqrt() - LEAST_ERROR**0.5)
        return t * ((error + LEAST_ERROR) ** power - LEAST_ERROR**power) / power
