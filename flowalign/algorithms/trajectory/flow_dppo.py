"""Flow-DPPO: a divergence threshold in place of the ratio clip (arXiv 2606.11025).

Rollout and credit are Flow-GRPO's. Loss: the plain ratio times the advantage, without a clip; an action is dropped
when the update moves it further away in the direction it is already going (A > 0 and ratio > 1, or A < 0 and
ratio < 1) and the divergence of its transition from the one that sampled, mean((mean - mean_old)^2) / (2 std^2), is
above `threshold`.
"""

from pydantic import Field
from torch import Tensor

from flowalign.algorithms.trajectory import base as trajectory
from flowalign.algorithms.trajectory.base import Steps, TrajectoryAlgorithm
from flowalign.config import Named
from flowalign.core.divergences import gaussian_kl
from flowalign.core.step_losses import dppo_mask


class FlowDPPOSettings(trajectory.PolicySettings):
    loss: Named = Named(name="ppo", clip_range=None)
    threshold: float = Field(1e-5, gt=0)


class FlowDPPO(TrajectoryAlgorithm):
    """Flow-DPPO: actions that moved too far are dropped by their divergence, nothing is clipped (arXiv 2606.11025)."""

    name = "flow_dppo"
    Settings = FlowDPPOSettings
    settings: FlowDPPOSettings

    def loss(self, actions: Steps) -> tuple[Tensor, dict[str, Tensor]]:
        step = actions.transition
        divergence = gaussian_kl(step.mean, actions.mean_old, step.std)
        keep = dppo_mask(actions.ratio, actions.advantage, divergence, self.settings.threshold)
        loss, metrics = self.policy_loss(actions)
        penalty, more = self.penalty(actions)
        return keep * loss + penalty, metrics | {"policy/clip_fraction": 1 - keep} | more
