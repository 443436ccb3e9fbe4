"""Kernels against torch.distributions, the authors' numbers, diffusers' DDIM, and Gaussians with a known flow."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)
from torch import Tensor, nn

from samplers import (
    KERNELS,
    LearnedNoise,
    Recorder,
    check_eta,
    cps,
    cps_published,
    dance_sde,
    ddim,
    ddim_published,
    flow_sde,
    linear_sde,
    ode,
    step_spread,
    step_std,
    transition,
    v_from_epsilon,
)
from samplers.kernels import Kernel, gaussian_log_prob

SHAPE = (4, 6, 6)
FLOW = sorted(set(KERNELS) - {"ddim", "ddim_published"})
"""kernels in flow matching's notation, the ODE where eta is 0"""
MARGINALS = sorted(set(FLOW) - {"cps", "cps_published"})
"""kernels that claim the ODE's marginals; cps keeps the noise level only, its predicted x0 loses spread"""


def state(batch: int = 6, eta: float = 0.7) -> dict[str, Tensor]:
    """Random samples and velocities down a schedule from sigma = 1, in steps of random size."""
    sigma = torch.linspace(1.0, 0.15, batch)
    return {
        "x": torch.randn(batch, *SHAPE),
        "v": torch.randn(batch, *SHAPE),
        "sigma": sigma,
        "sigma_next": sigma * (0.3 + 0.6 * torch.rand(batch)),
        "eta": torch.full((batch,), eta),
    }


@pytest.mark.parametrize("kernel", [flow_sde, dance_sde, cps, ddim, LearnedNoise((4, 1, 1)), LearnedNoise(SHAPE)])
def test_log_prob_is_that_of_the_normal_distribution_averaged_over_elements(kernel) -> None:
    made = transition(kernel, **state(), noise=torch.randn(6, *SHAPE))
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


def solver(name: str, shift: float, **settings: Any) -> Any:
    """UniPC or DPM-Solver as checkpoints of flow models have them."""
    classes = {"unipc": UniPCMultistepScheduler, "dpm": DPMSolverMultistepScheduler}
    return classes[name](prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift, **settings)


def euler(shift: float = 1.0, **settings: Any) -> Any:
    return FlowMatchEulerDiscreteScheduler(shift=shift, **settings)


def dynamic(base: float = 0.5, largest: float = 1.15, **settings: Any) -> Any:
    return euler(use_dynamic_shifting=True, base_shift=base, max_shift=largest, **settings)


PUBLISHED = {
    "sd3, sd3.5": euler(3.0),
    "flux dev, flux2": dynamic(),
    "flux schnell": euler(1.0),
    "qwen_image": dynamic(0.5, 0.9, max_image_seq_len=8192, shift_terminal=0.02),
    "z_image turbo": euler(3.0),
    "z_image, lumina2": euler(6.0),
    "chroma": euler(1.0, use_beta_sigmas=True),
    "cogview4": dynamic(0.25, 0.75, time_shift_type="linear"),
    "kandinsky5, hunyuan_image, hunyuan_video15": euler(5.0),
    "hunyuan_video": euler(7.0),
    "ltx, ltx2": dynamic(0.95, 2.05, shift_terminal=0.1),
    "sana": solver("dpm", 3.0, algorithm_type="dpmsolver++", solver_order=2),
    "wan 2.1, 2.2 14B": solver("unipc", 3.0),
    "wan 2.1 at 720p, 2.2 5B": solver("unipc", 5.0),
}
"""families by the schedulers that their published checkpoints carry"""


@pytest.mark.parametrize("steps", [10, 50])
@pytest.mark.parametrize("families", PUBLISHED)
def test_flow_sde_is_finite_on_the_schedules_of_published_checkpoints(families: str, steps: int) -> None:
    """No step's noise is much larger than eta, and what becomes of Gaussian data is smaller than the start noise."""
    scheduler = PUBLISHED[families]
    mu = {"mu": scheduler.config.max_shift} if isinstance(scheduler, FlowMatchEulerDiscreteScheduler) else {}
    scheduler.set_timesteps(steps, **mu)
    sigmas = scheduler.sigmas.double()
    assert sigmas[0] > 0.999 and sigmas[-1] == 0
    etas = torch.tensor([0.7] * (steps - 1) + [0.0]).double()
    stds = step_std(flow_sde, sigmas, etas)
    assert stds.max() < 1.5 and stds[0] == pytest.approx(0.7, rel=0.05)
    _, variance = gaussian_moments(flow_sde, sigmas, 0.7)[-1]
    assert variance.sqrt() < 0.9


ETAS = {"flow_sde": 0.9, "dance_sde": 0.7, "linear_sde": 0.983, "cps": 1.0, "cps_published": 1.0, "ode": 1.0}


@pytest.mark.parametrize("steps", [5, 10, 50])
def test_steps_keep_the_spread_of_their_levels_with_every_kernel_and_schedule(steps: int) -> None:
    """Below what is refused before training; with the old rule of flow_sde, far above it."""

    def exact(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
        finite = torch.where(sigma == 1, sigma_next, sigma)
        return dance_sde(x, v, sigma, sigma_next, eta * (sigma / (1 - finite)).sqrt())

    for families, scheduler in PUBLISHED.items():
        mu = {"mu": scheduler.config.max_shift} if isinstance(scheduler, FlowMatchEulerDiscreteScheduler) else {}
        scheduler.set_timesteps(steps, **mu)
        sigmas = scheduler.sigmas.double()
        for name, eta in ETAS.items():
            spread = step_spread(KERNELS[name], sigmas, torch.full_like(sigmas[:-1], eta))[:-1]
            assert spread.min() > 0.99 and spread.max() < 2.2, (families, name)
            if name.startswith(("cps", "ode")):
                torch.testing.assert_close(spread, torch.ones_like(spread))
        old = step_spread(exact, sigmas, torch.full_like(sigmas[:-1], 0.7))[0]
        assert (old > 3) == families.startswith(("sana", "wan")), (families, old)


def test_the_marginals_test_notices_noise_without_the_drift_that_goes_with_it() -> None:
    def noisy_ode(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
        return ode(x, v, sigma, sigma_next, eta)[0], flow_sde(x, v, sigma, sigma_next, eta)[1]

    assert marginal_error(noisy_ode, 640, 0.7, 1.0) > 0.02


def marginal_error(kernel: Kernel, steps: int, eta: float, shift: float) -> float:
    """How far mean and variance are off, at worst, halfway and at the end, for data N(m, s^2).

    The velocity E[noise - x0 | x] is linear in x, hence so is the step, x' = a x + b + std * noise, and mean and
    variance follow exactly: M' = a M + b, V' = a^2 V + std^2.
    """
    t = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    sigmas = shift * t / (1 + (shift - 1) * t)
    worst = 0.0
    for k, (mean, variance) in enumerate(gaussian_moments(kernel, sigmas, eta), 1):
        if k in (steps // 2, steps):
            true_variance = (1 - sigmas[k]) ** 2 * S**2 + sigmas[k] ** 2
            off = torch.stack([mean - (1 - sigmas[k]) * M, variance - true_variance]).abs().max()
            worst = max(worst, off.item())
    return worst


M, S = 0.5, 0.4
"""mean and standard deviation of Gaussian data"""


def gaussian_moments(kernel: Kernel, sigmas: Tensor, eta: float) -> list[tuple[Tensor, Tensor]]:
    """Mean and variance after each step; the last step has no noise."""
    m, s, steps = M, S, len(sigmas) - 1
    mean, variance, moments = torch.tensor(0.0).double(), torch.tensor(1.0).double(), []
    for k in range(steps):
        sigma, sigma_next = sigmas[k], sigmas[k + 1]
        slope = (sigma - (1 - sigma) * s**2) / ((1 - sigma) ** 2 * s**2 + sigma**2)
        noise_level = torch.tensor(eta if k < steps - 1 else 0.0, dtype=torch.float64)
        x = torch.tensor([0.0, 1.0], dtype=torch.float64)
        v = -m + slope * (x - (1 - sigma) * m)
        image, std = kernel(x, v, sigma, sigma_next, noise_level)
        b, a = image[0], image[1] - image[0]
        mean, variance = a * mean + b, a**2 * variance + std**2
        moments.append((mean, variance))
    return moments


def test_log_prob_of_no_noise_is_zero_not_infinite() -> None:
    value = torch.randn(2, 3)
    assert torch.equal(gaussian_log_prob(value, value, torch.zeros(2, 1)), torch.zeros(2))


def wide(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1, 1)


def test_dance_sde_is_the_published_step() -> None:
    """x + v dt + eta^2 / 2 * (x - (1 - s) x0) / s^2 dt, std eta sqrt(-dt), x0 = x - s v."""
    s = state(eta=0.3)
    sigma, dt = wide(s["sigma"]), wide(s["sigma_next"] - s["sigma"])
    x0 = s["x"] - sigma * s["v"]
    mean = s["x"] + s["v"] * dt + 0.3**2 / 2 * (s["x"] - (1 - sigma) * x0) / sigma**2 * dt
    made = transition(dance_sde, **s)
    torch.testing.assert_close(made.mean, mean, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(made.std, 0.3 * torch.sqrt(-dt))


def test_dance_sde_with_flow_sdes_diffusion_is_flow_sde() -> None:
    s = state()
    finite = torch.where(s["sigma"] == 1, s["sigma_next"], s["sigma"])
    g = s["eta"] * torch.sqrt(s["sigma"] / (1 - finite))
    dance, flow = transition(dance_sde, **s | {"eta": g}), transition(flow_sde, **s)
    torch.testing.assert_close(dance.mean, flow.mean, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(dance.std, flow.std, atol=1e-6, rtol=1e-5)


def test_linear_sde_gives_the_numbers_of_the_authors_code() -> None:
    """Recorded by running Flow-GRPO's script for Wan; eta is its schedule's second sigma."""
    recorded = json.loads((Path(__file__).parent / "wan_step.json").read_text())
    values = {k: torch.tensor(v) for k, v in recorded.items() if k != "source"}
    made = transition(
        linear_sde,
        values["x"],
        values["velocity"],
        values["sigma"],
        values["sigma_next"],
        values["eta"].expand(len(values["x"])),
        next=values["next"],
    )
    torch.testing.assert_close(made.mean, values["mean"], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(made.std.flatten(), values["std"], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(made.log_prob, values["log_prob"], atol=1e-5, rtol=1e-5)


def test_cps_is_the_published_step() -> None:
    s = state(eta=0.8)
    sigma, sigma_next = wide(s["sigma"]), wide(s["sigma_next"])
    x0, noise = s["x"] - sigma * s["v"], s["x"] + (1 - sigma) * s["v"]
    std = sigma_next * math.sin(0.8 * math.pi / 2)
    made = transition(cps, **s)
    torch.testing.assert_close(made.std, std)
    torch.testing.assert_close(
        made.mean, x0 * (1 - sigma_next) + noise * torch.sqrt(sigma_next**2 - std**2), atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("kernel", [cps, ddim])
def test_given_the_true_sample_the_noise_level_after_a_step_is_exact(kernel) -> None:
    """With v from the true x0 and noise, any step lands on the forward process whatever eta: coefficients kept."""
    n, sigma, sigma_next = 200_000, torch.tensor([0.9]), torch.tensor([0.4])
    x0, noise = torch.full((1, n), 0.7), torch.randn(1, n)
    x, v, keep = (1 - sigma) * x0 + sigma * noise, noise - x0, 1 - sigma_next
    for eta in (0.0, 0.5, 1.0):
        made = transition(kernel, x, v, sigma, sigma_next, torch.tensor([eta]), noise=torch.randn(1, n))
        assert made.next.mean().item() == pytest.approx((keep * 0.7).item(), abs=4e-3)
        assert made.next.std().item() == pytest.approx(0.4, abs=4e-3)


def test_the_published_log_prob_of_cps_is_two_variances_times_the_gaussian_ratio() -> None:
    s = state(eta=0.8)
    moved = s | {"v": s["v"] + 0.05 * torch.randn(6, *SHAPE)}
    next = transition(cps, **s, noise=torch.randn(6, *SHAPE)).next
    gauss, published = (
        transition(kernel, **moved, next=next).log_prob - transition(kernel, **s, next=next).log_prob
        for kernel in (cps, cps_published)
    )
    std = transition(cps, **s).std.flatten()
    torch.testing.assert_close(published, 2 * std**2 * gauss, atol=2e-6, rtol=1e-4)
    literal = -((next - transition(cps, **s).mean) ** 2).mean((1, 2, 3))
    torch.testing.assert_close(transition(cps_published, **s, next=next).log_prob, literal)
    assert not transition(cps_published, **s | {"eta": torch.zeros(6)}, next=next).log_prob.any()


def test_the_last_step_of_cps_and_ddim_has_no_noise() -> None:
    s = state() | {"sigma_next": torch.zeros(6)}
    for kernel in (cps, ddim):
        made = transition(kernel, **s, noise=torch.randn(6, *SHAPE))
        assert not made.std.any() and not made.log_prob.any() and made.next.isfinite().all()


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("eta", [0.0, 0.6, 1.0])
def test_ddim_is_diffusers_ddim(prediction: str, eta: float) -> None:
    """Stable Diffusion's own schedule, 20 of 1000 steps, down to the last."""
    scheduler = DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=True,
        steps_offset=1,
        prediction_type=prediction,
    )
    scheduler.set_timesteps(20)
    alpha_bars = torch.cat([scheduler.alphas_cumprod[scheduler.timesteps], scheduler.final_alpha_cumprod[None]])
    alphas, stds = alpha_bars.sqrt(), torch.sqrt(1 - alpha_bars)
    sigmas, scale = stds / (alphas + stds), 1 / (alphas + stds)
    for k, t in enumerate(scheduler.timesteps):
        x, output, noise = torch.randn(3, 1, *SHAPE)
        expected = scheduler.step(output, t, x, eta=eta, variance_noise=noise).prev_sample
        at, to, level = sigmas[k : k + 1], sigmas[k + 1 : k + 2], torch.tensor([eta])
        if prediction == "epsilon":
            v = v_from_epsilon(x * scale[k], output, at)
        else:
            v = (stds[k] - alphas[k]) * x + (stds[k] + alphas[k]) * output
        made = transition(ddim, x * scale[k], v, at, to, level, noise=noise)
        # x0 of a noise prediction divides by alpha, 0.07 at the first step
        torch.testing.assert_close(made.next / scale[k + 1], expected, atol=3e-4, rtol=1e-4)
        std = eta * scheduler._get_variance(t, t - 50).clamp(min=0).sqrt() if k < 19 else torch.tensor(0.0)
        torch.testing.assert_close(made.std.flatten() / scale[k + 1], std.view(1), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_the_last_step_of_ddim_published_goes_to_timestep_0(eta: float) -> None:
    """As that of diffusers' scheduler with set_alpha_to_one=False, and as ddpo-pytorch's; the others are ddim's."""
    scheduler = DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False
    )
    scheduler.set_timesteps(50)
    kept = scheduler.alphas_cumprod[scheduler.timesteps[-1] + 1]
    scale = 1 / (kept.sqrt() + (1 - kept).sqrt())
    sigma = ((1 - kept).sqrt() * scale).view(1)
    x, output, noise = torch.randn(3, 1, *SHAPE)
    expected = scheduler.step(output, scheduler.timesteps[-1] + 1, x, eta=eta, variance_noise=noise).prev_sample
    v = v_from_epsilon(x * scale, output, sigma)
    made = transition(ddim_published, x * scale, v, sigma, torch.zeros(1), torch.tensor([eta]), noise=noise)
    torch.testing.assert_close(made.next, expected, atol=1e-5, rtol=1e-4)
    assert (made.std.item() > 0.02) == (eta > 0)
    for name in ("mean", "std"):
        both = [getattr(transition(kernel, **state(eta=eta)), name) for kernel in (ddim, ddim_published)]
        assert both[0].shape == both[1].shape


def test_ddim_keeps_the_marginals_on_gaussian_data() -> None:
    """Noise-level schedule of DDPM, data N(0.5, 0.4^2), the exact v: linear steps, followed in closed form."""
    m, c = 0.5, 0.4
    for eta in (0.0, 0.5, 1.0):
        errors = []
        for steps in (50, 200, 800):
            angles = torch.linspace(math.pi / 2, 0, steps + 1, dtype=torch.float64)
            sigmas = torch.sin(angles) / (torch.sin(angles) + torch.cos(angles))
            mean, variance = torch.tensor(0.0).double(), torch.tensor(1.0).double()
            for k in range(steps):
                sigma, alpha = sigmas[k], 1 - sigmas[k]
                x = torch.tensor([0.0, 1.0], dtype=torch.float64)
                x0 = m + alpha * c**2 / (alpha**2 * c**2 + sigma**2) * (x - alpha * m)
                noise = sigma / (alpha**2 * c**2 + sigma**2) * (x - alpha * m)
                image, std = ddim(x, noise - x0, sigma, sigmas[k + 1], torch.tensor(eta).double())
                slope = image[1] - image[0]
                mean, variance = slope * mean + image[0], slope**2 * variance + std**2
            errors.append(abs(mean - m).item() + abs(variance - c**2).item())
        assert errors[2] < 0.3 * errors[0] and errors[2] < 5e-3, (eta, errors)


@pytest.mark.parametrize("kernel", [flow_sde, dance_sde, cps])
def test_step_std_is_the_std_of_the_transitions(kernel) -> None:
    sigmas, eta = torch.linspace(1, 0, 6), torch.tensor([[0.7, 0.0, 0.7, 0.4, 0.0], [0.7, 0.7, 0.7, 0.7, 0.0]])
    recorder = Recorder(torch.randn(2, *SHAPE), sigmas, kernel, eta, [0, 1])
    stds = step_std(kernel, sigmas, eta)
    assert stds.shape == (2, 5) and not stds[eta == 0].any()
    for k in range(5):
        made = transition(
            kernel, recorder.x, recorder.x, sigmas[k].expand(2), sigmas[k + 1].expand(2), eta[:, k], next=recorder.x
        )
        torch.testing.assert_close(made.std.flatten(), stds[:, k])


def test_a_share_of_the_noise_is_at_most_one() -> None:
    for name, kernel in KERNELS.items():
        check_eta(kernel, 1.0)
        with pytest.raises(ValueError, match="at least 0"):
            check_eta(kernel, -0.1)
        if name in ("cps", "cps_published", "ddim", "ddim_published"):
            with pytest.raises(ValueError, match="at most 1"):
                check_eta(kernel, 1.2)
        else:
            check_eta(kernel, 1.2)
    check_eta(LearnedNoise((4, 1, 1)), 1.2)


def trained_noise(**settings) -> LearnedNoise:
    """A network whose output is far from constant."""
    net = LearnedNoise(**{"shape": (4, 1, 1), "low": 0.05, "high": 0.2} | settings)
    for p in net.parameters():
        nn.init.normal_(p, std=2.0)
    return net


def test_learned_noise_stays_between_its_bounds_and_starts_in_their_geometric_middle() -> None:
    sigma = torch.rand(500)
    std = trained_noise().std(sigma)
    assert std.shape == (500, 4, 1, 1)
    assert std.min() >= 0.05 - 1e-7 and std.max() <= 0.2 + 1e-7 and std.max() / std.min() > 2
    torch.testing.assert_close(LearnedNoise((2, 3), 0.05, 0.2).std(sigma), torch.full((500, 2, 3), 0.1))


def test_learned_noise_is_the_odes_step_plus_noise_that_policy_gradients_reach() -> None:
    net, s = trained_noise(), state(eta=1.0)
    made = transition(net, **s, noise=torch.randn(6, *SHAPE))
    torch.testing.assert_close(made.mean, transition(ode, **s).mean)
    transition(net, **s, next=made.next.detach()).log_prob.sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in net.parameters())
    off = transition(net, **s | {"eta": torch.zeros(6)}, noise=torch.randn(6, *SHAPE))
    assert torch.equal(off.next, off.mean) and not off.log_prob.any()


def test_the_gradient_widens_the_noise_when_far_samples_are_good() -> None:
    s = state(eta=1.0)
    for distance, sign in ((3.0, 1), (0.1, -1)):
        net = LearnedNoise((4, 1, 1))
        with torch.no_grad():
            made = transition(net, **s)
            next = made.mean + distance * made.std * torch.randn(6, *SHAPE).sign()
        transition(net, **s, next=next).log_prob.mean().backward()
        assert (sign * net.net[-1].bias.grad > 0).all()


def test_learned_noise_knows_its_condition() -> None:
    net, s = trained_noise(condition_size=3), state(eta=1.0)
    condition = torch.randn(6, 3)
    both = transition(net.kernel(condition), **s)
    alone = transition(net.kernel(condition[5:]), **{k: v[5:] for k, v in s.items()})
    torch.testing.assert_close(both.std[5:], alone.std)
    assert (transition(net.kernel(condition.flip(0)), **s).std - both.std).abs().max() > 0.01
    with pytest.raises(ValueError, match=r"use given\(condition\)"):
        transition(net, **s)


def test_the_upper_bound_is_held_and_then_lowered() -> None:
    net = LearnedNoise((4, 1, 1), 0.1, 0.2, hold=0.35, decay=0.3)
    bounds = []
    for progress in (0.0, 0.35, 0.675, 1.0):
        net.anneal(progress)
        bounds.append(net.upper.item())
    np.testing.assert_allclose(bounds, [0.2, 0.2, 0.185, 0.17], rtol=1e-6)
    other = LearnedNoise((4, 1, 1), 0.1, 0.2)
    other.load_state_dict(net.state_dict())
    assert torch.equal(other.std(torch.ones(3)), net.std(torch.ones(3)))


def test_a_chain_of_one_learned_step_has_the_exact_likelihood() -> None:
    """One step from noise to sample: the record's log_prob is that of N(x + v dt, std)."""
    net = trained_noise()
    recorder = Recorder(torch.randn(5, *SHAPE), torch.tensor([1.0, 0.0]), net, torch.tensor([1.0]), range(5))
    v = torch.randn(5, *SHAPE)
    start = recorder.x
    with torch.no_grad():
        end = recorder.step(v)
        std = net.std(torch.ones(5)).expand_as(end)
    expected = torch.distributions.Normal(start - v, std).log_prob(end).flatten(1).mean(1)
    torch.testing.assert_close(recorder.trajectory().log_prob[:, 0], expected)


@pytest.mark.parametrize("settings", [{"low": 0.2, "high": 0.1}, {"low": 0.0}, {"hold": 1.0}, {"decay": 1.5}])
def test_impossible_bounds_are_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match="learned noise"):
        LearnedNoise((4, 1, 1), **settings)
