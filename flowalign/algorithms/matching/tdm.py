"""TDM: trajectory distribution matching, few-step distillation along the ODE (arXiv 2503.06674).

The generator's next state x_n, not its prediction of x0, is diffused further, to a level above its own:
x = a x_n + b noise with a = (1 - s) / (1 - s_n) and b = sqrt(s^2 - a^2 s_n^2). The noise that x then has is mixed of
the state's and the fresh one, and `fake` learns the velocity from the prediction of x0 to it.
"""

import torch
from torch import Tensor

from flowalign.actors.diffusion import DiffusionActor
from flowalign.algorithms.matching.distribution import DistributionMatching, Experience
from flowalign.data.batches import Batch
from flowalign.policies.diffusion import Noised
from flowalign.policies.diffusion.forward_process import ForwardProcess

MARGIN = 0.02
"""from the level of the generator's state to those it is diffused to, before the pipeline's shift"""


class TDM(DistributionMatching):
    """TDM: distribution matching at every step of a few-step trajectory (arXiv 2503.06674)."""

    def drawn_levels(self, actor: DiffusionActor, batch: Batch) -> Tensor:
        """[B, L] before the pipeline's shift, above the level of the state after each step."""
        share, call = super().drawn_levels(actor, batch), actor.config.rollout.arguments()
        kept = ("steps", "sigmas", "height", "width", "num_frames")
        at = {name: call[name] for name in kept if call.get(name) is not None}
        process = ForwardProcess(actor.policy)
        sigmas = process.sigmas(**at).cpu()
        after = torch.cat([sigmas[1:], sigmas.new_zeros(1)])
        sides = {name: value for name, value in at.items() if name not in ("steps", "sigmas")}
        low = process.before_shift(after, **sides)[self.steps(actor, batch)] + MARGIN
        return low + (1 - low) * share

    def diffused(self, experience: Experience, items: Tensor, state: Noised, x0: Tensor) -> Noised:
        noised = experience.noised(items)
        assert experience.generator is not None
        sigmas = torch.cat([experience.generator.sigmas, experience.generator.sigmas.new_zeros(1)])
        after = sigmas[state.levels + 1].view_as(noised.s)
        noise = state.x + (1 - state.s) * (state.x - x0) / state.s
        kept = (1 - noised.s) / (1 - after) * after
        # the noise of the state after the step, and fresh one for the rest
        noised.noise = (kept * noise + (noised.s**2 - kept**2).clamp(min=0).sqrt() * noised.noise) / noised.s
        noised.x0 = x0
        return noised
