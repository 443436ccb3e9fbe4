"""Weights of particles: sequential Monte Carlo as all methods use it."""

import math

import torch
from torch import Tensor


def systematic(weights: Tensor, generator: torch.Generator) -> Tensor:
    """[N] indices drawn with these weights [N], of sum 1: one even comb laid over them, so that each comes as often as
    N times its weight, rounded up or down. Equal weights draw everybody once."""
    count = len(weights)
    comb = (torch.arange(count, dtype=torch.float64) + torch.rand((), generator=generator, dtype=torch.float64)) / count
    return torch.searchsorted(weights.double().cumsum(0), comb).clamp(max=count - 1)


class ParticleWeights:
    """Log-weights of N particles, carried from step to step until they are resampled.

    The mean of the products of all potentials is estimated without bias, resampled or not: exp(`log_mean`).
    """

    def __init__(self, count: int) -> None:
        self.log = torch.zeros(count, dtype=torch.float64)
        self._gathered = 0.0

    def add(self, log_potential: Tensor) -> None:
        """Multiply by potentials, given as logarithms [N]."""
        self.log = self.log + log_potential.double().cpu()

    @property
    def shares(self) -> Tensor:
        """[N] weights of sum 1."""
        return self.log.softmax(0)

    @property
    def ess(self) -> float:
        """Effective sample size, 1 to N."""
        return 1 / float(self.shares.square().sum())

    @property
    def log_mean(self) -> float:
        """Logarithm of the estimate of the mean of the product of all potentials."""
        return self._gathered + float(self.log.logsumexp(0)) - math.log(len(self.log))

    def resample(self, below: float, generator: torch.Generator) -> Tensor | None:
        """[N] indices of the particles to go on with, all of equal weight; None to go on with all as they are.

        Args:
            below: share of N; an effective sample size that is smaller resamples.
        """
        # rounding is no spread
        if self.ess >= min(below, 1 - 1e-9) * len(self.log):
            return None
        rows = systematic(self.shares, generator)
        self._gathered = self.log_mean
        self.log = torch.zeros_like(self.log)
        return rows
