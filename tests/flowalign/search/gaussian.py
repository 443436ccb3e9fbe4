"""A model whose samples are N(mean, std^2) in every element, and whose velocity is known in closed form."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flowalign.policies.settings import Sampling
from flowalign.search import Budget, Engine
from rewards import Scores, Spec
from samplers import KERNELS, All, generators, normal

SHAPE = (1, 2, 2)
MEAN, STD = 0.5, 0.8


class Gaussian:
    """As much of a policy as a search asks for; samples are their latents."""

    def __init__(self, steps: int = 6) -> None:
        self.start_noise = None
        self.family, self.pipeline = SimpleNamespace(samples_sound=False, makes_sound=False), None
        self.sigmas = torch.linspace(1, 0, steps + 1)
        self.batches: list[list[int]] = []
        """the steps of each network batch"""

    def sample(self, prompts: list[str], seeds: Any, **_: Any) -> Any:
        x = normal(SHAPE, generators(seeds), "cpu")
        trajectory = SimpleNamespace(latents=x[:, None], sigmas=self.sigmas)
        conditions = SimpleNamespace(branches=1)
        return SimpleNamespace(trajectory=trajectory, conditions=conditions, whole=lambda latents, rows: latents)

    def velocity(self, rollout: Any, rows: Tensor, steps: Tensor, x: Tensor) -> Tensor:
        self.batches.append(steps.tolist())
        return velocity(x, self.sigmas[steps])

    def decode_pixels(self, latents: Tensor) -> Tensor:
        return latents

    def decode_latents(self, latents: Tensor, batch_size: int) -> list[Tensor]:
        return list(latents)


def velocity(x: Tensor, sigma: Tensor) -> Tensor:
    """E[noise - x0 | x] for x = (1 - sigma) x0 + sigma noise."""
    sigma = sigma.view(-1, *[1] * (x.dim() - 1))
    variance = ((1 - sigma) * STD) ** 2 + sigma**2
    off = x - (1 - sigma) * MEAN
    return sigma / variance * off - MEAN - (1 - sigma) * STD**2 / variance * off


class Linear:
    """The mean of a sample's elements."""

    name = "linear"
    spec = Spec(needs=frozenset({"prompt"}), differentiable=True)

    def __call__(self, samples: Any, prompts: Any, metadata: Any) -> Scores:
        return Scores(torch.stack([sample.mean() for sample in samples]))

    def score_pixels(self, pixels: Tensor, prompts: Any, metadata: Any) -> Scores:
        return Scores(pixels.flatten(1).mean(1))


def engine(budget: str = "samples=8", seed: int = 0, steps: int = 6, batch_size: int = 16) -> Engine:
    sampling = Sampling(steps=steps, batch_size=batch_size)
    policy: Any = Gaussian(steps)
    return Engine(policy, Linear(), "a number", sampling, seed=seed, budget=Budget.parse(budget))


def chain(kernel: str, eta: float, steps: int = 6) -> tuple[float, float]:
    """Mean and variance of an element of plain samples: each step is linear in x and adds noise."""
    sigmas, etas = torch.linspace(1, 0, steps + 1), All().etas(steps, eta, 0, 0)
    mean, variance = torch.zeros(()), torch.ones(())
    for at, to, level in zip(sigmas, sigmas[1:], etas, strict=False):
        points = torch.tensor([[0.0], [1.0]])
        made, std = KERNELS[kernel](points, velocity(points, at.expand(2)), at, to, level)
        slope = (made[1] - made[0]).squeeze()
        mean, variance = made[0].squeeze() + slope * mean, slope**2 * variance + std**2
    return float(mean), float(variance)
