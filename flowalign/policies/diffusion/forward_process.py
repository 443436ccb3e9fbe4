"""Clean samples on the forward process, for algorithms that learn from samples and not from how they were made."""

from dataclasses import dataclass

from torch import Tensor

from flowalign.policies.diffusion.conditions import Conditions
from samplers import Rows


@dataclass
class NoisedSamples(Rows):
    """B clean samples, each noised to a level: x = (1 - sigma) * x0 + sigma * noise."""

    x0: Tensor
    """[B, ...]"""
    noise: Tensor
    """[B, ...]"""
    sigma: Tensor
    """[B]"""
    conditions: Conditions
    levels: Tensor
    """[B] where in the conditions each sample's level is"""
    guidance: tuple[float, ...]
    """classifier-free scale"""

    @property
    def x(self) -> Tensor:
        """[B, ...] the noised samples."""
        sigma = self.sigma.view(-1, *[1] * (self.x0.dim() - 1))
        return (1 - sigma) * self.x0 + sigma * self.noise

    @property
    def velocity(self) -> Tensor:
        """[B, ...] the velocity that the network should predict."""
        return self.noise - self.x0
