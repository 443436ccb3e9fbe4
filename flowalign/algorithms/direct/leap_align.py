"""LeapAlign (arXiv 2604.15311): the reward's gradient reaches any step, along a trajectory of two leaps.

Of a rollout two random steps k < j are taken. One straight line leads from x_k to j, another from there to the
finished sample. The values stay the rollout's own (straight-through), only the gradient takes the leaps. The second
leap's gradient by way of its starting point is multiplied by `discount`, and a sample counts the less the further its
leaps end from where the rollout went.

After the abstract, for want of code: the values of `discount` and `similarity` and the form of the weight,
exp(-similarity * root mean square distance), summed over both leaps, are ours.
"""

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms.direct.base import DirectAlgorithm, DirectExperience, DirectSettings
from flowalign.errors import ConfigError
from flowalign.policies.diffusion.window import GradientWindow


class LeapAlignSettings(DirectSettings):
    discount: float = Field(0.5, ge=0, le=1)
    """Factor of the gradient that passes through the network twice; 0 leaves it out."""
    similarity: float = Field(1.0, ge=0)
    """Strength by which a sample counts less whose leaps end elsewhere; 0: all count alike."""


class LeapAlign(DirectAlgorithm):
    """LeapAlign: the reward's gradient along two leaps from any step (arXiv 2604.15311)."""

    name = "leap_align"
    Settings = LeapAlignSettings
    settings: LeapAlignSettings

    def windows(self, steps: int) -> range:
        if steps < 2:
            raise ConfigError("rollout.steps: two leaps take at least 2 steps; 5 works")
        return range(steps - 1)

    def finished(self, window: GradientWindow, experience: DirectExperience) -> Tensor:
        first = experience.first[window.samples]
        between = first + 1 + (experience.uniform(window.samples) * (window.last - 1 - first)).long()
        leapt = window.leap(window.state(first), first, between)
        middle = window.state(between) + leapt - leapt.detach()
        # another path of the same value, with less of the gradient
        seen = window.state(between) + self.settings.discount * (leapt - leapt.detach())
        end = middle + window.leap(seen, between) - seen
        final = window.state(window.last)
        gaps = _distance(leapt, window.state(between)) + _distance(end, final)
        weight = (-self.settings.similarity * gaps).exp().view(-1, *[1] * (final.dim() - 1))
        return final + weight * (end - end.detach())


@torch.no_grad()
def _distance(x: Tensor, y: Tensor) -> Tensor:
    """[N] root mean square over elements."""
    return (x - y).square().flatten(1).mean(1).sqrt()
