"""AWM: advantage-weighted matching (arXiv 2509.25050).

The policy gradient with an error of the forward process in the place of a log-probability: good samples are matched,
bad ones unmatched, in proportion to their advantages. `old` is a close average of the policy that holds it back.

Departure: the authors' ratio exp(l - l_old) and its clip are left out; with one update an iteration, as they run it,
the ratio is 1, the clip does nothing, and the gradient is the one here.
"""

from collections.abc import Mapping

from pydantic import Field
from torch import Tensor

from flowalign.algorithms.matching.advantage import AdvantageMatching, AdvantageSettings
from flowalign.algorithms.matching.base import Points
from flowalign.algorithms.matching.likelihood import Weighting, weighted_error
from flowalign.core.divergences import velocity_mse
from flowalign.policies.settings import Snapshot


class AWMSettings(AdvantageSettings):
    weighting: Weighting = "ghuber"
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
        unlikely = weighted_error(points.error, points.noised.sigma, self.settings.weighting, self.settings.power)
        return advantage * unlikely + self.settings.old_weight * moved, {"matching/moved": moved}
