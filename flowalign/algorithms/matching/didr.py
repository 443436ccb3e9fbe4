"""DIDR: a few-step generator is matched to the teacher tilted by a reward, at all noise levels (arXiv 2605.24001).

The best distribution under a reward r and a divergence of weight beta from the teacher's is p exp(r / beta). Diffused,
its score at x is the teacher's plus the gradient of log E[exp(r(x0) / beta) | x], the *diffused reward score*. Its
proxy is the gradient in x of r / beta at what the teacher denoises x to in a few steps that gradients flow through.
Distribution matching goes on with this sum as the teacher's score: x0 moves along
(teacher's x0 + s^2 / (1 - s) * proxy - fake's x0).

With one denoising step the proxy is exact for a linear reward; else it misses the spread of x0 given x.

After the abstract and the authors' model page: their code is not public. The weights of levels and of the distance are
DMD's, and the number of denoising steps is chosen here.
"""

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms.matching import base
from flowalign.algorithms.matching.distribution import DistributionSettings, towards
from flowalign.algorithms.matching.rewarded import RewardedExperience, RewardedMatching
from flowalign.config import Config
from flowalign.core.record import Record
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import CleanSamples, DiffusersPolicy, Noised
from flowalign.policies.diffusion.window import unwrapped
from flowalign.policies.settings import Role
from flowalign.rollouts.pictures import SampledPictures
from flowalign.rollouts.processes import Processes


class DIDRSettings(DistributionSettings):
    fake: Role = Role(updates=5)
    """Optimizer of the generator's own score."""
    beta: float = Field(1.0, gt=0)
    """Weight of the divergence from the teacher against the reward."""
    denoising_steps: int = Field(1, ge=1)
    """Steps of the teacher from a noised sample to the picture that is rewarded, evenly spread."""


@dataclass(kw_only=True)
class DIDRExperience(RewardedExperience):
    descent: CleanSamples | None = None
    """Conditions of the teacher on its way down from the levels."""
    descent_index: Tensor | None = None
    """[B, L, K] the levels of that way, falling"""


class DIDR(RewardedMatching):
    """DIDR: distribution matching to a teacher tilted by a diffused reward (arXiv 2605.24001)."""

    name = "didr"
    Settings = DIDRSettings
    settings: DIDRSettings
    experience_type = DIDRExperience

    def check(self, config: Config) -> None:
        super().check(config)
        if not self.draw_levels(config.rollout.steps, torch.Generator()).is_floating_point():
            raise ConfigError("algorithm.levels: the teacher walks down from levels between 0 and 1; uniform works")

    def experience(self, sampled: SampledPictures, record: Record, processes: Processes) -> base.MatchingExperience:
        experience = super().experience(sampled, record, processes)
        assert isinstance(experience, DIDRExperience)
        sampler, batch, count = sampled.sampler, experience.batch, self.settings.denoising_steps
        shares = torch.arange(count, 0, -1) / count
        drawn = (self.drawn_levels(sampler, batch)[..., None] * shares).flatten(1)
        guidance = self.settings.reference_guidance or self.guidance(sampler)
        experience.descent, index = self.at_levels(sampler, batch, experience.clean.x0, drawn, guidance)
        experience.descent_index = index.unflatten(1, (-1, count))
        return experience

    def losses(
        self, policy: DiffusersPolicy, experience: base.MatchingExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(experience, DIDRExperience) and experience.generator is not None
        assert experience.descent_index is not None
        state = experience.states(items)
        x0 = state.clean(policy.velocity_of(experience.generator, state).float())
        noised = self.diffused(experience, items, state, x0.detach())
        fake, teacher = self.asked(policy, experience, noised)
        index = experience.descent_index[experience.members(items), experience.places(items)]
        value, shift = self.tilt(policy, experience, noised, index)
        loss = towards(x0, x0.detach() + teacher + shift - fake, teacher)
        return loss, {
            "distillation/gap": (teacher - fake).square().flatten(1).mean(1),
            "didr/tilt": shift.square().flatten(1).mean(1),
            "didr/denoised_reward": value,
        }

    def tilt(
        self, policy: DiffusersPolicy, experience: DIDRExperience, noised: Noised, index: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[N] rewards of what the teacher denoises samples to, and [N, ...] what their proxy moves its x0 by.

        Args:
            index: [N, K] levels of the teacher's way, of which the first is the samples'.
        """
        x = noised.x.detach().requires_grad_()
        with torch.enable_grad(), policy.reference(), unwrapped(policy):
            value = experience.value(policy, denoised(policy, experience, noised, index, x), noised.samples)
            (gradient,) = torch.autograd.grad(value.sum(), x)
        return value.detach(), noised.s**2 / (1 - noised.s) * gradient / self.settings.beta


def denoised(policy: DiffusersPolicy, experience: DIDRExperience, noised: Noised, index: Tensor, x: Tensor) -> Tensor:
    """[N, ...] finished samples of the current weights from states x [N, ...] along levels [N, K], by Euler's rule."""
    way = experience.descent
    assert way is not None
    for number in range(index.shape[1]):
        at = way.noised_by(noised.samples, index[:, number], noised.noise)
        after = 0 if number + 1 == index.shape[1] else way.sigmas[index[:, number + 1]].view_as(at.s)
        x = x + (after - at.s) * policy.velocity_of(way, at, x).float()
    return x
