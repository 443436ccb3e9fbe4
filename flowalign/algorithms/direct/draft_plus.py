"""DRaFT+: DRaFT held near the start weights by the squared difference of their predictions in the window.

Authors' code (NeMo-Aligner, megatron_sd_draftp_model.py): 50 steps with guidance 7.5, the window is the last step, the
loss is -reward + 1.0 * mean((eps - eps_start)^2).

Departures: the difference is of velocities, which for a model of epsilon is epsilon's over 1 - sigma. Their
annealed guidance, which mixes tuned and start predictions in use, is no part of training.
"""

from pydantic import Field

from flowalign.algorithms.direct.last_steps import LastSteps, LastStepsSettings


class DRaFTPlusSettings(LastStepsSettings):
    kl_weight: float = Field(1.0, gt=0)
    """Weight of the mean squared difference of the window's velocities from the start weights'."""


class DRaFTPlus(LastSteps):
    """DRaFT+: DRaFT with a penalty on the window's distance from the start weights (NeMo-Aligner)."""

    name = "draft_plus"
    Settings = DRaFTPlusSettings
    settings: DRaFTPlusSettings
