"""Kernels against torch.distributions, the authors' own numbers, and Gaussians with a known flow."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from samplers import KERNELS, flow_sde, ode, transition
from samplers.kernels import Kernel, gaussian_log_prob

SHAPE = (3, 4, 5)
FLOW = sorted(set(KERNELS) - {"ddim"})
"""kernels in flow matching's notation, the ODE where eta is 0"""
MARGINALS = sorted(set(FLOW) - {"cps", "cps_published"})
"""kernels that claim the ODE's marginals; cps keeps the noise level only, its predicted x0 loses spread"""


def state(batch: int = 6) -> dict[str, Tensor]:
    """Random samples and velocities at random steps of a schedule."""
    sigma = torch.rand(batch) * 0.9 + 0.08
    return {
        "x": torch.randn(batch, *SHAPE),
        "v": torch.randn(batch, *SHAPE),
        "sigma": sigma,
        "sigma_next": sigma * torch.rand(batch) * 0.9,
        "eta": torch.full((batch,), 0.7),
    }


def test_log_prob_is_that_of_the_normal_distribution_averaged_over_elements() -> None:
    made = transition(flow_sde, **state(), noise=torch.randn(6, *SHAPE))
    expected = torch.distributions.Normal(made.mean, made.std.expand_as(made.mean)).log_prob(made.next)
    torch.testing.assert_close(made.log_prob, expected.flatten(1).mean(1))


@pytest.mark.parametrize("name", KERNELS)
def test_a_scored_transition_is_the_one_that_was_made(name: str) -> None:
    inputs = state()
    made = transition(KERNELS[name], **inputs, noise=torch.randn(6, *SHAPE))
    scored = transition(KERNELS[name], **inputs, next=made.next)
    assert torch.equal(scored.log_prob, made.log_prob)
    assert torch.equal(scored.mean, made.mean) and torch.equal(scored.std, made.std)


@pytest.mark.parametrize("name", FLOW)
def test_without_noise_level_every_kernel_is_the_ode(name: str) -> None:
    inputs = state() | {"eta": torch.zeros(6)}
    inputs["sigma"][0] = 1
    made = transition(KERNELS[name], **inputs, noise=torch.randn(6, *SHAPE))
    expected = transition(ode, **inputs)
    torch.testing.assert_close(made.next, expected.next)
    assert not made.std.any() and not made.log_prob.any()


def test_some_samples_of_a_batch_can_be_deterministic() -> None:
    inputs = state() | {"eta": torch.tensor([0.7, 0.0] * 3)}
    made = transition(flow_sde, **inputs, noise=torch.randn(6, *SHAPE))
    assert (made.log_prob[::2] != 0).all() and (made.log_prob[1::2] == 0).all()
    assert torch.equal(made.next[1::2], made.mean[1::2])


def test_a_deterministic_step_gives_finite_gradients() -> None:
    """A where() over log(0) would poison them."""
    inputs = state() | {"eta": torch.tensor([0.7, 0.0] * 3)}
    stored = transition(flow_sde, **inputs, noise=torch.randn(6, *SHAPE)).next
    inputs["v"].requires_grad_()
    transition(flow_sde, **inputs, next=stored).log_prob.sum().backward()
    assert inputs["v"].grad.isfinite().all()
    assert not inputs["v"].grad[1::2].any()


def test_maths_is_float32_whatever_the_network_returns() -> None:
    inputs = state()
    half = transition(flow_sde, **inputs | {"v": inputs["v"].bfloat16()}, noise=torch.zeros(6, *SHAPE))
    same = transition(flow_sde, **inputs | {"v": inputs["v"].bfloat16().float()}, noise=torch.zeros(6, *SHAPE))
    assert half.next.dtype == half.log_prob.dtype == torch.float32
    assert torch.equal(half.next, same.next)


def test_flow_sde_by_the_papers_rule_one_number_at_a_time() -> None:
    inputs = state(batch=4)
    inputs["sigma"][0] = 1.0
    mean, std = literal(inputs)
    made = transition(flow_sde, **inputs)
    torch.testing.assert_close(made.mean, mean)
    torch.testing.assert_close(made.std.flatten(), std)


def literal(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Flow-GRPO (arXiv 2505.05470): x + [v + g^2 / (2 s) * (x + (1 - s) v)] dt + g sqrt(-dt) noise."""
    mean, std = torch.zeros_like(inputs["x"]), torch.zeros(len(inputs["x"]))
    for b in range(len(mean)):
        s, dt = inputs["sigma"][b].item(), (inputs["sigma_next"][b] - inputs["sigma"][b]).item()
        g = inputs["eta"][b].item() * math.sqrt(s / (1 - (inputs["sigma_next"][b].item() if s == 1 else s)))
        std[b] = g * math.sqrt(-dt)
        for place in torch.cartesian_prod(*map(torch.arange, SHAPE)).tolist():
            x, v = inputs["x"][(b, *place)].item(), inputs["v"][(b, *place)].item()
            mean[(b, *place)] = x + (v + g**2 / (2 * s) * (x + (1 - s) * v)) * dt
    return mean, std


def test_flow_sde_gives_the_numbers_of_the_authors_code() -> None:
    """Recorded by running it; 'source' in the file says what was called. Its first step starts at sigma = 1."""
    recorded = json.loads((Path(__file__).parent / "flow_grpo_step.json").read_text())
    assert recorded["sigma"][0] == 1
    values = {k: torch.tensor(v) for k, v in recorded.items() if k != "source"}
    made = transition(
        flow_sde,
        values["x"],
        values["velocity"],
        values["sigma"],
        values["sigma_next"],
        values["eta"].expand(4),
        next=values["next"],
    )
    torch.testing.assert_close(made.mean, values["mean"], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(made.std.flatten(), values["std"], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(made.log_prob, values["log_prob"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("eta", [0.3, 0.7])
@pytest.mark.parametrize("name", MARGINALS)
def test_kernels_keep_the_marginals_of_the_ode(name: str, eta: float, shift: float) -> None:
    """On Gaussian data mean and variance come closer to the flow's as the steps get finer, halfway and at the end.

    A rule with a wrong drift or noise stays away by a constant, however fine the steps.
    """
    errors = [marginal_error(KERNELS[name], steps, eta, shift) for steps in (40, 160, 640)]
    assert errors[0] > errors[1] > errors[2], errors
    assert errors[2] < 0.25 * errors[0], errors
    assert errors[2] < 8e-3, errors


def test_the_marginals_test_notices_noise_without_the_drift_that_goes_with_it() -> None:
    def noisy_ode(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
        return ode(x, v, sigma, sigma_next, eta)[0], flow_sde(x, v, sigma, sigma_next, eta)[1]

    assert marginal_error(noisy_ode, 640, 0.7, 1.0) > 0.02


def marginal_error(kernel: Kernel, steps: int, eta: float, shift: float) -> float:
    """How far mean and variance are off, at worst, halfway and at the end, for data N(m, s^2).

    The velocity E[noise - x0 | x] is linear in x, hence so is the step, x' = a x + b + std * noise, and mean and
    variance follow exactly: M' = a M + b, V' = a^2 V + std^2.
    """
    m, s = 0.5, 0.4
    t = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    sigmas = shift * t / (1 + (shift - 1) * t)
    mean, variance, worst = torch.tensor(0.0).double(), torch.tensor(1.0).double(), 0.0
    for k in range(steps):
        sigma, sigma_next = sigmas[k], sigmas[k + 1]
        slope = (sigma - (1 - sigma) * s**2) / ((1 - sigma) ** 2 * s**2 + sigma**2)
        noise_level = torch.tensor(eta if k < steps - 1 else 0.0, dtype=torch.float64)
        x = torch.tensor([0.0, 1.0], dtype=torch.float64)
        v = -m + slope * (x - (1 - sigma) * m)
        image, std = kernel(x, v, sigma, sigma_next, noise_level)
        b, a = image[0], image[1] - image[0]
        mean, variance = a * mean + b, a**2 * variance + std**2
        if k + 1 in (steps // 2, steps):
            true_variance = (1 - sigma_next) ** 2 * s**2 + sigma_next**2
            off = torch.stack([mean - (1 - sigma_next) * m, variance - true_variance]).abs().max()
            worst = max(worst, off.item())
    return worst


def test_log_prob_of_no_noise_is_zero_not_infinite() -> None:
    value = torch.randn(2, 3)
    assert torch.equal(gaussian_log_prob(value, value, torch.zeros(2, 1)), torch.zeros(2))
