"""Flow-OPD: several teachers by prompt at the student's own SDE steps, and an anchor (arXiv 2605.08063).

At each stochastic step the student's Gaussian is drawn to its teacher's by gap = |mu - mu_teacher|^2 / (2 g^2), which
is -dt times their KL, g the diffusion without sqrt(-dt) as in Flow-GRPO's code. Manifold anchor regularisation adds
`kl_weight` times the same distance from one more network, for all prompts: `anchor`, by default the start weights.

`mode: kl_only`, the authors' default, clips the ratio of a policy gradient whose advantage is -gap, within -5 and 5.
The gap depends on the state and not on the step that was drawn, so that the mean of gap * grad log p is 0; what teaches
is the gradient of the advantage itself, which the released code does not detach. `gkd` is the gap alone, without that
noise. Published: SD3.5 medium, 10 steps, eta 0.7, guidance 4.5, anchor 0.04, rate 1e-4, clip 1e-4; teachers are
Flow-GRPO's LoRAs for text and for GenEval, and the student starts from their mean.

Departure: the released advantages [N, 1] meet ratios [N], so that each sample's gap is multiplied with the ratios of
all of its micro-batch; here with its own.
"""

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms.matching import base
from flowalign.algorithms.matching.teachers import NetworkSettings, TaughtMatching, TaughtSettings
from flowalign.config import Config
from flowalign.core.losses import clipped_policy_loss
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import DiffusersPolicy


class FlowOPDSettings(TaughtSettings):
    stochastic: bool = True
    anchor: NetworkSettings = NetworkSettings()
    kl_weight: float = Field(0.04, ge=0)
    """Weight of the distance from the anchor."""
    mode: Literal["kl_only", "gkd"] = "kl_only"
    """With the clipped ratio, or the gap alone."""
    clip_range: float = Field(1e-4, gt=0)
    """Distance from 1 at which the ratio is clipped."""
    largest_gap: float = Field(5.0, gt=0)
    """A gap above it has no gradient in `kl_only`."""


class FlowOPD(TaughtMatching):
    """Flow-OPD: teachers by prompt at the student's SDE steps, held to an anchor (arXiv 2605.08063)."""

    name = "flow_opd"
    Settings = FlowOPDSettings
    settings: FlowOPDSettings

    @property
    def compares_reference(self) -> bool:
        return super().compares_reference and self.settings.anchor.path is None

    def check(self, config: Config) -> None:
        super().check(config)
        if not self.settings.stochastic:
            raise ConfigError(
                "algorithm.stochastic: flow_opd compares Gaussian steps; true works, or algorithm.name: opd"
            )
        if self.settings.anchor.path is None and self.settings.anchor.lora is not None:
            raise ConfigError("algorithm.anchor: without a path it is the start weights, without a LoRA; path: ...")

    def modules(self, policy: DiffusersPolicy) -> dict[str, Any]:
        self.anchor = self.settings.anchor.load(policy)
        return super().modules(policy)

    def points(self, policy: DiffusersPolicy, experience: base.MatchingExperience, items: Tensor) -> base.Points:
        points = super().points(policy, experience, items)
        if self.anchor is not None and self.settings.kl_weight:
            points.reference = self.asked(policy, self.anchor, experience.clean, points.noised)
        return points

    def loss(self, points: base.Points) -> tuple[Tensor, dict[str, Tensor]]:
        assert points.taught is not None and points.rollout is not None
        gap = self.gap(points, points.taught)
        if self.settings.mode == "gkd":
            return gap, {"distillation/gap": gap}
        at, clip = (points.noised.samples, points.noised.level_index), self.settings.clip_range
        log_prob, old = self.step(points, points.velocity).log_prob, points.rollout.trajectory.log_prob[at]
        loss = clipped_policy_loss(log_prob, old, -gap.clamp(max=self.settings.largest_gap), clip, clip)
        return loss, {"distillation/gap": gap, "policy/ratio": (log_prob - old).exp()}

    def divergence(self, points: base.Points) -> Tensor:
        """[N] the same distance from the anchor's steps."""
        assert points.reference is not None
        return self.gap(points, points.reference)

    def gap(self, points: base.Points, other: Tensor) -> Tensor:
        """[N] |mu - mu_other|^2 / (2 g^2), the mean over elements; 0 where a step has no noise."""
        assert points.rollout is not None
        step, theirs = self.step(points, points.velocity), self.step(points, other)
        sigmas, at = points.rollout.trajectory.sigmas, points.noised.level_index
        dt = (sigmas[at + 1] - sigmas[at]).view_as(points.noised.s)
        noisy = step.std > 0
        diffusion2 = torch.where(noisy, step.std, 1) ** 2 / -dt
        return torch.where(noisy, (step.mean - theirs.mean) ** 2 / (2 * diffusion2), 0).flatten(1).mean(1)
