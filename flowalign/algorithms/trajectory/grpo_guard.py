"""GRPO-Guard: a ratio that is centred and equally wide at every step (arXiv 2510.22319).

Rollout and credit are Flow-GRPO's. Loss: the log-ratio is corrected by its bias mean((mean - mean_old)^2) / (2 std^2)
and multiplied by std (RatioNorm, `core.losses.guard_log_ratio`), so that one clip range serves all steps, and each
step's policy loss is divided by -dt, which evens out their gradients. The clip range is far smaller than Flow-GRPO's:
about 2e-6. Any method of the family takes the same by `ratio: guard`.
"""

from typing import Literal

from flowalign.algorithms.trajectory import base as trajectory
from flowalign.algorithms.trajectory.base import TrajectoryAlgorithm
from flowalign.config import Named


class GRPOGuardSettings(trajectory.PolicySettings):
    loss: Named = Named(name="ppo", clip_range=2e-6)
    ratio: Literal["plain", "guard"] = "guard"


class GRPOGuard(TrajectoryAlgorithm):
    """GRPO-Guard: normalised ratios and evened-out step gradients against over-optimisation (arXiv 2510.22319)."""

    name = "grpo_guard"
    Settings = GRPOGuardSettings
