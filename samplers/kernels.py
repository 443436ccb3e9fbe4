"""Transition kernels: the Gaussian that takes a sample from one noise level to the next.

Notation: sigma in [0, 1] is the noise level, x = (1 - sigma) * x0 + sigma * noise, the velocity is
v = noise - x0, and dt = sigma_next - sigma < 0. A kernel maps (x, v, sigma, sigma_next, eta) to the mean and
standard deviation of the next sample; its arguments broadcast against x, and eta = 0 gives the ODE step.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def ode(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
    """Euler step of the probability-flow ODE; no noise whatever eta is."""
    return x + v * (sigma_next - sigma), torch.zeros_like(sigma)


def flow_sde(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
    """Flow-GRPO's SDE with the marginals of the ODE (arXiv 2505.05470, eq. 12): g = eta * sqrt(s / (1 - s)).

    The diffusion is infinite at sigma = 1; there 1 - s uses the schedule's second sigma, as the authors' code
    does. Published eta: 0.7.
    """
    dt = sigma_next - sigma
    finite = torch.where(sigma == 1, sigma_next, sigma)
    g2 = eta**2 * sigma / (1 - finite)
    mean = x * (1 + g2 / (2 * sigma) * dt) + v * (1 + g2 * (1 - sigma) / (2 * sigma)) * dt
    return mean, torch.sqrt(g2 * -dt)


KERNELS: dict[str, Kernel] = {"ode": ode, "flow_sde": flow_sde}


@dataclass
class Transition:
    """One step of B samples: the Gaussian, the sample taken, and its log-probability, all float32."""

    mean: Tensor
    """[B, ...]"""
    std: Tensor
    """[B, 1, ...], broadcasts against mean; 0 where the step is deterministic"""
    next: Tensor
    """[B, ...]"""
    log_prob: Tensor
    """[B], the mean over the elements of a sample; 0 where the step is deterministic"""


def transition(
    kernel: Kernel,
    x: Tensor,
    v: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    eta: Tensor,
    *,
    noise: Tensor | None = None,
    next: Tensor | None = None,
) -> Transition:
    """Make a step, or score a stored one: sampling and scoring share every line of the arithmetic.

    Args:
        x, v: [B, ...] sample and velocity, any float dtype; the maths is float32.
        sigma, sigma_next, eta: [B], each sample its own step of the schedule.
        noise: [B, ...] standard normal, to make a step. None makes the deterministic step to the mean.
        next: [B, ...] the stored next sample, to score a step already taken.
    """
    x, v = x.float(), v.float()
    sigma, sigma_next, eta = (s.float().view(-1, *[1] * (x.dim() - 1)) for s in (sigma, sigma_next, eta))
    mean, std = kernel(x, v, sigma, sigma_next, eta)
    if next is None:
        next = mean if noise is None else mean + std * noise
    return Transition(mean, std, next, gaussian_log_prob(next.float(), mean, std))


def gaussian_log_prob(value: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Mean over the elements of a sample of log N(value; mean, std): [B, ...] -> [B]; 0 where std is 0."""
    stochastic = std > 0
    std = torch.where(stochastic, std, torch.ones_like(std))
    log_prob = -((value - mean) ** 2) / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)
    return torch.where(stochastic, log_prob, torch.zeros_like(log_prob)).flatten(1).mean(1)
