"""Transition kernels: the Gaussian that takes a sample from one noise level to the next.

Notation: sigma in [0, 1] is the noise level, x = (1 - sigma) * x0 + sigma * noise, the velocity is
v = noise - x0, and dt = sigma_next - sigma < 0. A kernel maps (x, v, sigma, sigma_next, eta) to the mean and
standard deviation of the next sample; its arguments broadcast against x, and eta = 0 gives the ODE step. What is
special about a kernel is declared where it is defined, by `declares`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def gaussian_log_prob(value: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Mean over the elements of a sample of log N(value; mean, std): [B, ...] -> [B]; 0 where std is 0."""
    stochastic = std > 0
    std = torch.where(stochastic, std, torch.ones_like(std))
    log_prob = -((value - mean) ** 2) / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)
    return torch.where(stochastic, log_prob, torch.zeros_like(log_prob)).flatten(1).mean(1)


def squared_error_log_prob(value: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Mean over the elements of a sample of -(value - mean)^2: [B, ...] -> [B]; 0 where std is 0 (2509.05952)."""
    log_prob = -((value - mean) ** 2)
    return torch.where(std > 0, log_prob, torch.zeros_like(log_prob)).flatten(1).mean(1)


@dataclass(frozen=True)
class Traits:
    """Declarations of a kernel; by default it is a Gaussian with any eta from 0."""

    largest_eta: float = math.inf
    """Largest eta that works: 1 where eta is the share of the noise that a step replaces."""
    log_prob: Callable[[Tensor, Tensor, Tensor], Tensor] = gaussian_log_prob
    """The function of (value, mean, std) that gives it."""
    learned: bool = False
    """Whether a network decides on the noise, not the levels and eta alone."""


GAUSSIAN = Traits()


def declares(traits: Traits) -> Callable[[Kernel], Kernel]:
    """Decorator: the kernel has these traits."""

    def declare(kernel: Kernel) -> Kernel:
        vars(kernel).update(traits=traits)
        return kernel

    return declare


def traits_of(kernel: Kernel) -> Traits:
    """Declarations of a kernel."""
    traits: Traits = getattr(kernel, "traits", GAUSSIAN)
    return traits


def ode(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
    """Euler step of the probability-flow ODE; no noise whatever eta is."""
    return x + v * (sigma_next - sigma), torch.zeros_like(sigma)


def flow_sde(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
    """Flow-GRPO's SDE with the marginals of the ODE (arXiv 2505.05470): g = eta * sqrt(s / (1 - s)).

    The diffusion is infinite at sigma = 1; there 1 - s uses the schedule's second sigma, as the authors' code
    does. So it does just below 1, where flow solvers of a higher order start to keep their logarithms finite (UniPC
    at 0.999999, DPM-Solver at 0.9997): wherever 1 - sigma is less than a tenth of 1 - sigma_next. Published eta: 0.7.
    """
    finite = torch.where(10 * (1 - sigma) < 1 - sigma_next, sigma_next, sigma)
    return _sde(x, v, sigma, sigma_next, eta**2 * sigma / (1 - finite))


def dance_sde(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
    """DanceGRPO's SDE with the marginals of the ODE (arXiv 2505.07818): the diffusion is g = eta at every step.

    Finite at sigma = 1. Published eta: 0.3 (FLUX, Wan), 0.25 (HunyuanVideo); DenseGRPO calibrates one a step.
    """
    return _sde(x, v, sigma, sigma_next, eta**2)


def linear_sde(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
    """The SDE of Flow-GRPO's script for Wan, with the marginals of the ODE: the diffusion is g = eta * s.

    Finite at sigma = 1. The script's eta is the schedule's second sigma: 0.983 at Wan's 20 steps of shift 3.
    """
    return _sde(x, v, sigma, sigma_next, (eta * sigma) ** 2)


def _sde(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, g2: Tensor) -> tuple[Tensor, Tensor]:
    """Euler-Maruyama step of the SDE with diffusion g: dx = (v + g^2 / (2 s) * (x + (1 - s) v)) dt + g dw.

    x + (1 - s) v is the predicted noise, so that its share of the drift is -g^2 / 2 times the score.
    """
    dt = sigma_next - sigma
    mean = x * (1 + g2 / (2 * sigma) * dt) + v * (1 + g2 * (1 - sigma) / (2 * sigma)) * dt
    return mean, torch.sqrt(g2 * -dt)


@declares(Traits(largest_eta=1))
def cps(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
    """Coefficients-preserving sampling (arXiv 2509.05952): part of the predicted noise is replaced by fresh noise.

    The noise level after a step is exactly sigma_next, whatever the step's size: with the true x0 and noise in
    place of the predicted ones the marginals are exact. eta in [0, 1] is the share of noise replaced as an angle:
    0 the ODE, 1 all of it. Published eta: 0.7 to 0.9.
    """
    angle = eta * (math.pi / 2)
    x0, noise = x - sigma * v, x + (1 - sigma) * v
    return (1 - sigma_next) * x0 + sigma_next * torch.cos(angle) * noise, sigma_next * torch.sin(angle)


@declares(Traits(largest_eta=1, log_prob=squared_error_log_prob))
def cps_published(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
    """`cps` with its authors' log-probability -(next - mean)^2, the Gaussian one times 2 std^2 without constants.

    A step's log-ratio is thereby 2 std^2 times the Gaussian one: quiet steps weigh less and clip later.
    """
    return cps(x, v, sigma, sigma_next, eta)


@declares(Traits(largest_eta=1))
def ddim(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
    """DDIM with noise (arXiv 2010.02502, eq. 12 and 16), whose steps DDPO trains (2305.13301).

    DDPM's x = alpha * x0 + std * noise, with alpha^2 + std^2 = 1, is the x here divided by the hypotenuse of sigma
    and 1 - sigma, at sigma = std / (alpha + std). eta in [0, 1]: 0 the ODE, 1 ancestral sampling. Published eta: 1.
    """
    norm, norm_next = torch.hypot(1 - sigma, sigma), torch.hypot(1 - sigma_next, sigma_next)
    alpha, alpha_next = (1 - sigma) / norm, (1 - sigma_next) / norm_next
    variance = (sigma_next * norm / sigma) ** 2 * (1 - (alpha / alpha_next) ** 2)
    x0, noise = x - sigma * v, x + (1 - sigma) * v
    # rounding must not carry what eta = 1 leaves of the old noise below zero
    variance_left = (sigma_next**2 - eta**2 * variance).clamp(min=0)
    return (1 - sigma_next) * x0 + torch.sqrt(variance_left) * noise, eta * torch.sqrt(variance)


FIRST_LEVEL = math.sqrt(0.00085) / (math.sqrt(0.00085) + math.sqrt(1 - 0.00085))
"""Sigma at timestep 0 of Stable Diffusion 1.5, 2 and XL."""


@declares(Traits(largest_eta=1))
def ddim_published(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
    """`ddim` whose last step ends at timestep 0, not at x0, and so carries noise: ddpo-pytorch's steps.

    What is left of the noise there stays in the picture: std 0.03 in latents. For Stable Diffusion's timesteps; to
    train the last step too, the plan is {name: all, last: true}.
    """
    end = sigma_next.clamp(min=FIRST_LEVEL)
    mean, std = ddim(x, v, sigma, end, eta)
    # in DDPM's notation the state stays as it is
    scale = torch.hypot(1 - sigma_next, sigma_next) / torch.hypot(1 - end, end)
    return mean * scale, std * scale


def v_from_epsilon(x: Tensor, epsilon: Tensor, sigma: Tensor) -> Tensor:
    """The velocity at x that a noise prediction stands for; sigma in (0, 1) broadcasts against x [B, ...]."""
    return (epsilon - x) / (1 - sigma)


KERNELS: dict[str, Kernel] = {
    "ode": ode,
    "flow_sde": flow_sde,
    "dance_sde": dance_sde,
    "linear_sde": linear_sde,
    "cps": cps,
    "cps_published": cps_published,
    "ddim": ddim,
    "ddim_published": ddim_published,
}


def check_eta(kernel: Kernel, eta: float) -> None:
    """Refuse a noise level the kernel has no meaning for.

    Raises:
        ValueError: eta is negative or above the largest that the kernel declares.
    """
    if eta < 0:
        raise ValueError(f"eta is {eta:g}; it is at least 0")
    largest = traits_of(kernel).largest_eta
    if eta > largest:
        raise ValueError(f"eta is {eta:g}; with this kernel it is at most {largest:g}")


def step_std(kernel: Kernel, sigmas: Tensor, eta: Tensor) -> Tensor:
    """Standard deviation of each step of a schedule: sigmas [T + 1], eta [T] or [B, T] -> shaped like eta.

    Not for `LearnedNoise`, whose std has more than one number a step.
    """
    zero = torch.zeros_like(eta)
    return kernel(zero, zero, sigmas[:-1].expand_as(eta), sigmas[1:].expand_as(eta), eta)[1]


def step_sensitivity(kernel: Kernel, sigmas: Tensor, eta: Tensor) -> Tensor:
    """How far a unit of velocity moves each step's mean, in standard deviations of its noise; infinite without noise.

    The gradient of a step's log-probability in the velocity is proportional to it. Shapes as of `step_std`.
    """
    zero = torch.zeros_like(eta)
    mean, std = kernel(zero, torch.ones_like(eta), sigmas[:-1].expand_as(eta), sigmas[1:].expand_as(eta), eta)
    return mean.abs() / std


def step_spread(kernel: Kernel, sigmas: Tensor, eta: Tensor) -> Tensor:
    """Standard deviation after each step over what the next level says; 1 where a step keeps the ODE's marginals.

    Of clean samples and noise of standard deviation 1, walked with their own velocity, so that no network is asked. A
    step's size makes it a little more than 1, and at the last one, which should leave no noise, more than that.

    Args:
        sigmas: [T + 1].
        eta: [T].

    Returns:
        [T]. Not for `LearnedNoise`.
    """
    s, s_next, one = sigmas[:-1], sigmas[1:], torch.ones_like(eta)
    of_clean, std = kernel(1 - s, -one, s, s_next, eta)
    of_noise, _ = kernel(s, one, s, s_next, eta)
    return torch.sqrt((of_clean**2 + of_noise**2 + std**2) / ((1 - s_next) ** 2 + s_next**2))


@dataclass(kw_only=True)
class Transition:
    """One step of B samples: the Gaussian, the sample taken, and its log-probability, all float32."""

    mean: Tensor
    """[B, ...]"""
    std: Tensor
    """[B, ...], broadcasts against mean; 0 where the step is deterministic"""
    next: Tensor
    """[B, ...]"""
    log_prob: Tensor
    """[B], the mean over the elements of a sample; 0 where the step is deterministic"""

    @property
    def stochastic(self) -> Tensor:
        """[B] bool."""
        return self.std.flatten(1).amax(1) > 0


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
    return Transition(mean=mean, std=std, next=next, log_prob=traits_of(kernel).log_prob(next.float(), mean, std))
