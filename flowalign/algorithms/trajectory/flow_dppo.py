"""Flow-DPPO: a divergence threshold in place of the ratio clip (arXiv 2606.11025).

Rollout and credit are Flow-GRPO's. Loss: the plain ratio times the advantage; an action is dropped when the update
moves it further away in the direction it is already going (A > 0 and ratio > 1, or A < 0 and ratio < 1) and the
divergence of its transition from the one that sampled, mean((mean - mean_old)^2) / (2 std^2), is above `threshold`.
"""

from pydantic import Field
from torch import Tensor

from flowalign.algorithms.trajectory import base as trajectory
from flowalign.algorithms.trajectory.base import Actions, TrajectoryAlgorithm
from flowalign.core.divergences import gaussian_kl
from flowalign.core.losses import dppo_mask


class FlowDPPOSettings(trajectory.PolicySettings):
    threshold: float = Field(1e-5, gt=0)


class FlowDPPO(TrajectoryAlgorithm):
    """Flow-DPPO: actions that moved too far are dropped by their divergence, nothing is clipped (arXiv 2606.11025)."""

    Settings = FlowDPPOSettings
    settings: FlowDPPOSettings

    def loss(self, actions: Actions) -> tuple[Tensor, dict[str, Tensor]]:
        made = actions.transition
        divergence = gaussian_kl(made.mean, actions.mean_old, made.std)
        keep = dppo_mask(actions.ratio, actions.advantage, divergence, self.settings.threshold)
        penalty, metrics = self.penalty(actions)
        return -keep * actions.advantage * actions.ratio + penalty, {"policy/clip_fraction": 1 - keep, **metrics}
