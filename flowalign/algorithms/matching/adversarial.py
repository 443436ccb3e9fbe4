"""A discriminator beside distribution matching (DMD2, arXiv 2405.14867, section 4.3).

It tells real samples from the generator's, both noised to the same levels, by features of the network that learns the
generator's score, and is trained along with that. The generator learns to be taken for real.

Departure: the authors' convolutions bring a U-Net's middle down to one number; here each position of the middle block
has a number from two layers, and they are averaged, since a transformer's block has no smaller picture.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import softplus

from flowalign.algorithms.matching import distribution
from flowalign.policies.diffusion import Noised
from flowalign.settings import Section
from samplers import derive_seed
from samplers.noise import generators, normal


class Gan(Section):
    """The discriminator's part in the losses."""

    weight: float = Field(5e-3, gt=0)
    """Weight of the adversarial term in the generator's loss, on the authors' scale, where the distance to the target
    has the factor 1/2; published: 0.005 for Stable Diffusion XL, 0.001 for 1.5, 0.003 for ImageNet."""
    fake_weight: float = Field(1e-2, gt=0)
    """Weight of the discriminator's own loss in the loss of `fake`."""
    real: Literal["files", "teacher"] = "files"
    """Source of real samples: pictures or videos of the data, as `sft` reads them, or the teacher's own samples."""
    steps: int = Field(28, ge=1)
    """Steps of the teacher's samples."""


@dataclass(kw_only=True)
class AdversarialExperience(distribution.DistributionExperience):
    real: Tensor | None = None
    """[B, ...] real samples of the same prompts"""

    def noised_real(self, items: Tensor) -> Noised:
        """Real samples at the levels of these items, by noise of their own."""
        assert self.real is not None
        noised, columns = self.noised(items), self.places(items)
        pairs = zip(noised.samples.tolist(), columns.tolist(), strict=True)
        seeds = [derive_seed(self.noise_seeds[sample], column, 13) for sample, column in pairs]
        noise = normal(self.real.shape[1:], generators(seeds), self.real.device)
        return replace(noised, x0=self.real[noised.samples], noise=noise)


class Discriminator(nn.Module):
    """Logits of how real noised samples are, from features of a network.

    Args:
        width: D of the features.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, features: Tensor) -> Tensor:
        """[N] logits from features [N, tokens, D]."""
        return self.layers(features.float()).mean((1, 2))


def telling_apart(made: Tensor, real: Tensor) -> Tensor:
    """[N] the discriminator's loss by its logits [N] of generated and of real samples."""
    return softplus(made) + softplus(-real)


def passing(logit: Tensor, x0: Tensor, at: Tensor) -> Tensor:
    """[N] the generator's loss by logits [N] of its samples, whose gradient reaches x0 [N, ...].

    It is taken at once, while the network has the weights that the logits are of.

    Args:
        at: [N, ...] the values of x0, which the logits depend on.
    """
    loss = softplus(-logit)
    (slope,) = torch.autograd.grad(loss.sum(), at)
    return loss.detach() + (slope * (x0 - x0.detach())).flatten(1).sum(1)
