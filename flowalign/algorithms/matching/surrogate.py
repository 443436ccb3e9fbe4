"""The surrogate of a reward along a few-step generator's trajectory (TDM-R1, arXiv 2603.07700).

It is asked at a state x_n of the trajectory, diffused to x = a x_n + b noise at a level s above: its target is the
velocity of the score given that state, (s noise / b - x) / (1 - s), and whole groups are preferred by their errors.
"""

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms.matching.along_ode import AlongODESettings
from flowalign.algorithms.matching.base import MatchingExperience
from flowalign.config import Named
from flowalign.core.divergences import velocity_mse
from flowalign.core.step_losses import group_preference_loss, has_moved
from flowalign.policies.diffusion import CleanSamples, DiffusersPolicy, Noised
from flowalign.policies.settings import Role, Snapshot
from samplers import derive_seed


class SurrogateSettings(AlongODESettings):
    advantage: Named = Named(name="grpo", scale="batch", clip=5.0)
    """Name in `flowalign list advantages`, with its settings."""
    surrogate: Role = Role()
    """Optimizer of the surrogate."""
    slow: Snapshot = Snapshot(decay="0-0.001-0.001-0.3", every="update", of="surrogate")
    """Average of the surrogate, to which it is held."""
    beta: float = Field(1.0, gt=0)
    """Sharpness of a group's weight, which falls from 1 to 0."""
    clip_range: float = Field(1e-3, gt=0)
    """Clip of a sample's ratio exp(e_slow - e): no gradient beyond it; published: 0.001, 0.002 for preferences."""
    surrogate_kl: float = Field(1e-3, ge=0)
    """Weight of the mean squared difference of the surrogate's and the teacher's velocities."""
    runaway: float = Field(0.05, gt=0)
    """Mean of that difference above which samples that are ahead of the teacher have no gradient."""
    least_judged: float = Field(0.3, ge=0, lt=0.95)
    """Noise level above which the surrogate learns; published: 0.3 for OCR, 0.25 for GenEval, 0.4 for others."""


@dataclass
class SurrogatePoints:
    """States and levels at which a surrogate learns."""

    clean: CleanSamples
    level_index: Tensor
    """[B, L] numbers of the levels."""
    steps: Tensor
    """[B, L] the steps, whose next states are diffused"""

    def noised(self, experience: MatchingExperience, items: Tensor) -> tuple[Noised, Tensor]:
        """The diffused states, with the surrogate's targets as their velocities, and [N] their steps."""
        assert experience.rollout is not None
        samples, columns = experience.members(items), experience.places(items)
        steps, level_index = self.steps[samples, columns], self.level_index[samples, columns]
        trajectory = experience.rollout.trajectory
        # one noise for all members of a group, and another at each place
        seeds = [
            derive_seed(group, experience.batch.iteration, column, 9)
            for group, column in zip(experience.group[samples].tolist(), columns.tolist(), strict=True)
        ]
        at = self.clean.noised(samples, level_index, seeds)
        after = trajectory.sigmas[steps + 1].view_as(at.s)
        scale = (1 - at.s) / (1 - after)
        fresh = (at.s**2 - (after * scale) ** 2).clamp(min=0).sqrt()
        x = scale * trajectory.latents[samples, steps + 1] + fresh * at.noise
        return self.clean.at_states(samples, level_index, x, (at.s * at.noise / fresh - x) / (1 - at.s)), steps

    def losses(
        self, policy: DiffusersPolicy, experience: MatchingExperience, items: Tensor, settings: SurrogateSettings
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """[N] of whole groups, under the surrogate's weights, and named [N] values for the metrics.

        DGPO's losses, and the distance from the teacher; later steps count more, in proportion to their number.
        """
        noised, steps = self.noised(experience, items)
        with torch.no_grad():
            with policy.reference():
                teacher = policy.velocity_of(self.clean, noised).float()
            with policy.snapshot("slow"):
                slow = policy.velocity_of(self.clean, noised).float()
        velocity = policy.velocity_of(self.clean, noised).float()
        error, other = noised.error(velocity), noised.error(teacher)
        advantage, gap = experience.advantage[noised.samples], velocity_mse(velocity, teacher)
        ahead = (advantage * (error - other)).detach() < 0
        still = has_moved(error, noised.error(slow), advantage, settings.clip_range)
        still |= ahead & (gap.detach().mean() > settings.runaway)
        loss, weight = group_preference_loss(error, other, advantage, len(error) // len(items), settings.beta, still)
        share = (steps + 1) / (len(experience.rollout.trajectory.sigmas) - 1)  # type: ignore[union-attr]
        values = {"surrogate/weight": weight, "surrogate/gap": gap, "surrogate/clip_fraction": still.float()}
        return share * (loss + settings.surrogate_kl * gap), values
