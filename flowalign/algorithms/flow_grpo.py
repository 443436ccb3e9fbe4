"""Flow-GRPO: group-relative policy optimisation of flow models by an SDE rollout (arXiv 2505.05470).

Rollout: the ODE is turned into an SDE with the same marginals (kernel `flow_sde`), each denoising step a Gaussian
action. Credit: one reward a finished picture, normalised within the prompt's group, shared by all its steps.
Loss: PPO's clip on every step plus the closed-form KL to the start weights.

Departure from the authors' code: their KL divides by 2 g^2, g the diffusion without sqrt(-dt); this is the KL of
the two Gaussians, so a published `kl_weight` is about (-dt) times as large here.
"""

from pydantic import Field
from torch import Tensor

from flowalign.algorithms.trajectory import Actions, Record, Settings, TrajectoryAlgorithm
from flowalign.core.advantages import Scale, group_advantage
from flowalign.core.divergences import gaussian_kl
from flowalign.core.losses import clip_fraction, clipped_policy_loss


class FlowGRPOSettings(Settings):
    clip_range: float = Field(1e-4, gt=0)
    clip_range_high: float | None = Field(None, gt=0)
    """upper clip, default clip_range"""
    kl_weight: float = Field(0.0, ge=0)
    advantage_scale: Scale = "group"
    """divide advantages by the standard deviation of the group, of the batch, or none"""
    advantage_clip: float = Field(5.0, gt=0)


class FlowGRPO(TrajectoryAlgorithm):
    """Flow-GRPO: one reward a trajectory, clipped policy gradient on every SDE step (arXiv 2505.05470)."""

    Settings = FlowGRPOSettings
    settings: FlowGRPOSettings

    @property
    def uses_reference(self) -> bool:
        return self.settings.kl_weight > 0

    def credit(self, record: Record) -> Tensor:
        s = self.settings
        return group_advantage(record.reward, record.group, s.advantage_scale, s.advantage_clip)

    def loss(self, actions: Actions) -> tuple[Tensor, dict[str, Tensor]]:
        low = self.settings.clip_range
        high = self.settings.clip_range_high or low
        surrogate = (actions.log_prob, actions.old_log_prob, actions.advantage, low, high)
        loss = clipped_policy_loss(*surrogate)
        metrics = {"policy/clip_fraction": clip_fraction(*surrogate)}
        if actions.mean_reference is not None:
            kl = gaussian_kl(actions.mean, actions.mean_reference, actions.std)
            loss = loss + self.settings.kl_weight * kl
            metrics["policy/kl"] = kl
        return loss, metrics
