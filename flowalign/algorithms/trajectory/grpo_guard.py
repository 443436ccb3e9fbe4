"""GRPO-Guard: a ratio that is centred and equally wide at every step (arXiv 2510.22319).

Rollout and credit are Flow-GRPO's. Loss: the log-ratio is corrected by its bias mean((mean - mean_old)^2) / (2 std^2)
and multiplied by std (RatioNorm), so that one clip range serves all steps, and each step's loss is divided by -dt,
which evens out their gradients. The clip range is far smaller than Flow-GRPO's: about 2e-6.
"""

from dataclasses import replace

import torch
from torch import Tensor

from flowalign import registry
from flowalign.algorithms.trajectory import base as trajectory
from flowalign.algorithms.trajectory.base import Steps, TrajectoryAlgorithm
from flowalign.config import Config, Named
from flowalign.core.losses import guard_log_ratio
from flowalign.errors import ConfigError
from samplers.kernels import gaussian_log_prob, traits_of


class GRPOGuardSettings(trajectory.PolicySettings):
    loss: Named = Named(name="ppo", clip_range=2e-6)


class GRPOGuard(TrajectoryAlgorithm):
    """GRPO-Guard: normalised ratios and evened-out step gradients against over-optimisation (arXiv 2510.22319)."""

    Settings = GRPOGuardSettings

    def check(self, config: Config) -> None:
        super().check(config)
        kernel = registry.resolve("kernels", config.rollout.kernel)
        if traits_of(kernel).log_prob is not gaussian_log_prob:
            raise ConfigError(
                f"rollout.kernel: grpo_guard corrects Gaussian log-probabilities, and '{config.rollout.kernel}' has "
                "others; cps and flow_sde work"
            )

    def log_ratio(self, actions: Steps) -> Tensor:
        made = actions.transition
        return guard_log_ratio(made.log_prob, actions.old_log_prob, made.mean, actions.mean_old, made.std)

    def loss(self, actions: Steps) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio = self.log_ratio(actions)
        loss, metrics = super().loss(replace(actions, log_prob=log_ratio, old_log_prob=torch.zeros_like(log_ratio)))
        return loss / -actions.dt, metrics
