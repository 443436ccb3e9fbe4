"""DMD2: distribution matching distillation of a generator of a few steps (arXiv 2405.14867).

What the generator predicts at one of its steps is diffused by fresh noise. Its samples are made as they are at use:
with `stochastic`, `rollout.kernel: cps` and `eta: 1`, every step puts fresh noise on its prediction of x0, as the
authors' generator does; the default is the ODE.

Departure: the authors' discriminator, which makes the teacher's errors good by real pictures, is left out.
"""

from torch import Tensor

from flowalign.algorithms.matching.distribution import DistributionMatching, Experience
from flowalign.policies.diffusion import Noised


class DMD2(DistributionMatching):
    """DMD2: a few-step generator by the difference of two scores (arXiv 2405.14867)."""

    def diffused(self, experience: Experience, items: Tensor, state: Noised, x0: Tensor) -> Noised:
        noised = experience.noised(items)
        noised.x0 = x0
        return noised
