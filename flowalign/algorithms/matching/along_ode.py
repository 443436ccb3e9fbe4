"""Few-step generators along the ODE: their next state is diffused further, not their prediction of x0.

A state x_n at level s_n is diffused to x = a x_n + b noise at a level s above, with a = (1 - s) / (1 - s_n) and
b = sqrt(s^2 - a^2 s_n^2). What `fake` learns there is one of two velocities:

- `prediction`, as published (TDM, arXiv 2503.06674): from the prediction of x0 to the noise that x then has, mixed of
  the state's and the fresh one. The state's is not independent of its x0, so that this is the score of x after the
  last step alone, where s_n = 0;
- `state`, the velocity of the score given the state, (s noise / b - x) / (1 - s), as TDM-R1's surrogate learns it. Its
  mean at x is the score of x after every step. Errors are weighed by (b / s)^2, since it grows as b shrinks.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Generator, Tensor

from flowalign.algorithms.matching.distribution import (
    DistributionExperience,
    DistributionMatching,
    DistributionSettings,
)
from flowalign.data.batches import Batch
from flowalign.policies.diffusion import Noised
from flowalign.policies.diffusion.forward_process import ForwardProcess
from flowalign.rollouts.pictures import DiffusionSampler

MARGIN = 0.02
"""Distance from the level of the generator's state to the levels it is diffused to, before the pipeline's shift."""


class AlongODESettings(DistributionSettings):
    fake_learns: Literal["prediction", "state"] = "prediction"
    """Target of `fake`: the velocity to the generator's prediction of x0, or of the score given its state."""


class AlongODE(DistributionMatching):
    """Base of the methods that match the states of a trajectory."""

    Settings = AlongODESettings
    settings: AlongODESettings

    def drawn_levels(self, sampler: DiffusionSampler, batch: Batch) -> Tensor:
        """[B, L] before the pipeline's shift, above the level of the state after each step."""
        return self._above(sampler, self.steps(sampler, batch), super().drawn_levels(sampler, batch))

    def above(self, sampler: DiffusionSampler, batch: Batch, steps: Tensor, seed: int, least: float) -> Tensor:
        """[B, L] levels before the pipeline's shift above the states after these steps, the same for all samples.

        Args:
            least: noise level, after the shift, that they are above too.
        """
        shares = self.draw_levels(sampler.config.rollout.steps, Generator().manual_seed(seed))
        return self._above(sampler, steps, shares.expand(len(batch), -1), least)

    @staticmethod
    def _above(sampler: DiffusionSampler, steps: Tensor, share: Tensor, least: float = 0.0) -> Tensor:
        call = sampler.config.rollout.arguments()
        names = ("steps", "sigmas", "height", "width", "num_frames", "duration")
        at = {name: call[name] for name in names if call.get(name) is not None}
        process = ForwardProcess(sampler.policy)
        sigmas = process.sigmas(**at).cpu()
        after = torch.cat([sigmas[1:], sigmas.new_zeros(1)])
        sides = {name: value for name, value in at.items() if name not in ("steps", "sigmas")}
        low = process.before_shift(after.clamp(min=least), **sides)[steps] + MARGIN
        return low + (1 - low) * share

    def diffused(self, experience: DistributionExperience, items: Tensor, state: Noised, x0: Tensor) -> Noised:
        noised = experience.noised(items)
        assert experience.generator is not None
        sigmas = torch.cat([experience.generator.sigmas, experience.generator.sigmas.new_zeros(1)])
        after = sigmas[state.level_index + 1].view_as(noised.s)
        fresh, noise = noised.noise, state.x + (1 - state.s) * (state.x - x0) / state.s
        scale = (1 - noised.s) / (1 - after) * after
        b = (noised.s**2 - scale**2).clamp(min=0).sqrt()
        # the noise of the state after the step, and fresh one for the rest
        noised = replace(noised, x0=x0, noise=(scale * noise + b * fresh) / noised.s)
        if self.settings.fake_learns == "prediction":
            return noised
        x, velocity = noised.x, (noised.s * fresh / b - noised.x) / (1 - noised.s)
        weight = noised.error_weight * (b / noised.s).view_as(noised.sigma) ** 2
        return replace(noised, x0=x - noised.s * velocity, noise=x + (1 - noised.s) * velocity, error_weight=weight)
