"""Rollouts of a velocity function, and scoring what they stored."""

import pytest
import torch
from torch import Tensor

from samplers import KERNELS, All, Trajectory, Window, flow_sde, generators, normal, ode, rollout, sample_ode
from samplers.kernels import Kernel

SIGMAS = torch.tensor([1.0, 0.8, 0.6, 0.35, 0.1, 0.0])
STEPS = len(SIGMAS) - 1
SEEDS = [11, 12, 13, 14]


def velocity(x: Tensor, sigma: Tensor) -> Tensor:
    """A nonlinear stand-in for a network; every row on its own."""
    return torch.tanh(x * 0.8 + sigma.view(-1, 1, 1) * 0.3) - 0.1


def roll(kernel: Kernel = flow_sde, eta: Tensor | None = None, seeds: list[int] = SEEDS) -> Trajectory:
    noise = normal((2, 3), generators([seed + 100 for seed in seeds]), "cpu")
    eta = All().etas(STEPS, 0.7, 0, 0) if eta is None else eta
    return rollout(velocity, noise, SIGMAS, kernel, eta, seeds)


def pairs(batch: int) -> tuple[Tensor, Tensor]:
    samples, steps = torch.cartesian_prod(torch.arange(batch), torch.arange(STEPS)).unbind(1)
    order = torch.randperm(len(samples))
    return samples[order], steps[order]


@pytest.mark.parametrize("name", KERNELS)
def test_scoring_the_stored_steps_gives_ratio_one(name: str) -> None:
    made = roll(KERNELS[name])
    samples, steps = pairs(len(made))
    v = velocity(made.latents[samples, steps], made.sigmas[steps])
    scored = made.score(KERNELS[name], v, samples, steps)
    ratio = torch.exp(scored.log_prob - made.log_prob[samples, steps])
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-6, rtol=0)


def test_another_velocity_gives_another_ratio_at_the_stochastic_steps_only() -> None:
    made = roll()
    samples, steps = pairs(len(made))
    v = velocity(made.latents[samples, steps], made.sigmas[steps]) + 0.1
    ratio = torch.exp(made.score(flow_sde, v, samples, steps).log_prob - made.log_prob[samples, steps])
    assert torch.equal(ratio != 1, steps < STEPS - 1)


def test_the_last_step_carries_no_noise_and_no_log_prob() -> None:
    made = roll()
    assert made.mask.tolist() == [[True] * (STEPS - 1) + [False]] * len(SEEDS)
    assert (made.log_prob[:, -1] == 0).all() and (made.log_prob[:, :-1] != 0).all()
    expected = made.latents[:, -2] + made.velocity[:, -1] * (SIGMAS[-1] - SIGMAS[-2])
    assert torch.equal(made.final, expected)


@pytest.mark.parametrize("name", sorted(set(KERNELS) - {"ddim", "ddim_published"}))  # of DDPM's notation
def test_without_noise_levels_a_rollout_is_the_ode(name: str) -> None:
    made = roll(KERNELS[name], eta=torch.zeros(STEPS))
    expected = sample_ode(velocity, made.latents[:, 0], SIGMAS)
    torch.testing.assert_close(made.final, expected)
    assert not made.mask.any() and not made.log_prob.any()


def test_the_ode_is_eulers_method() -> None:
    noise = torch.randn(2, 2, 3)
    x = noise
    for k in range(STEPS):
        x = x + (SIGMAS[k + 1] - SIGMAS[k]) * velocity(x, SIGMAS[k].expand(2))
    torch.testing.assert_close(sample_ode(velocity, noise, SIGMAS), x)


def test_a_sample_does_not_depend_on_its_batch() -> None:
    together, alone = roll(), roll(seeds=[SEEDS[2]])
    assert torch.equal(together.latents[2], alone.latents[0])
    assert torch.equal(together.log_prob[2], alone.log_prob[0])


def test_samples_may_have_their_own_noise_levels() -> None:
    """Row by row the same as in batches of their own, also where only some of the samples are stochastic."""
    eta = torch.stack([Window(size=1, start=k).etas(STEPS, 0.7, 0, 0) for k in (0, 1, 2, 3)])
    together = roll(eta=eta)
    assert torch.equal(together.mask, eta > 0)
    for b in range(4):
        # a generator draws for its own sample's steps alone, whatever its neighbours do
        x, (noise,) = together.latents[b], normal_sequence(SEEDS[b], 1)
        for k in range(STEPS):
            v = velocity(x[k : k + 1], SIGMAS[k : k + 1])
            s, s_next, e = SIGMAS[k], SIGMAS[k + 1], eta[b, k]
            mean, std = flow_sde(x[k : k + 1], v, s, s_next, e)
            drawn = noise if eta[b, k] > 0 else 0.0
            torch.testing.assert_close(x[k + 1], (mean + std * drawn)[0])
        alone = roll(seeds=[SEEDS[b]], eta=eta[b])
        assert torch.equal(together.latents[b], alone.latents[0])


def normal_sequence(seed: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, generator=generator) for _ in range(count)]


def test_trajectories_join_and_split() -> None:
    made = roll()
    joined = Trajectory.cat([made[:1], made[1:]])
    for name in ("latents", "velocity", "log_prob", "eta", "sigmas"):
        assert torch.equal(getattr(joined, name), getattr(made, name))
    picked = made[torch.tensor([3, 0])]
    assert torch.equal(picked.final, made.final[[3, 0]]) and len(picked) == 2


def test_the_record_has_the_documented_shapes() -> None:
    made = roll(ode)
    assert made.latents.shape == (4, STEPS + 1, 2, 3) and made.velocity.shape == (4, STEPS, 2, 3)
    assert made.log_prob.shape == made.eta.shape == made.mask.shape == (4, STEPS)
    assert {t.dtype for t in (made.latents, made.velocity, made.log_prob, made.eta)} == {torch.float32}


def test_a_step_without_noise_is_not_stochastic_whatever_the_plan_says() -> None:
    assert not roll(ode, eta=torch.full((STEPS,), 0.7)).mask.any()
    # cps carries no noise into sigma 0
    assert roll(KERNELS["cps"], eta=torch.full((STEPS,), 0.7)).mask.tolist()[0] == [True] * (STEPS - 1) + [False]
