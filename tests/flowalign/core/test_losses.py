"""The further losses and divergences: closed forms, the authors' rules literally, and the gradients' directions."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from flowalign.core.divergences import gaussian_entropy, gaussian_kl, velocity_mse
from flowalign.core.losses import clip_fraction, clipped_policy_loss, dppo_mask, guard_log_ratio, noise_weight
from samplers import flow_sde, step_std
from samplers.kernels import gaussian_log_prob

SHAPE = (4, 6, 6)


def test_dual_clip_by_the_rule_one_number_at_a_time() -> None:
    log_ratio, advantage = torch.randn(500) * 2, torch.randn(500)
    made = clipped_policy_loss(log_ratio, torch.zeros(500), advantage, 0.2, 0.3, dual=3.0)
    for lr, a, loss in zip(log_ratio.tolist(), advantage.tolist(), made.tolist()):
        r = math.exp(lr)
        surrogate = min(r * a, min(max(r, 0.8), 1.3) * a)
        expected = -max(surrogate, 3 * a) if a < 0 else -surrogate
        assert loss == pytest.approx(expected, rel=1e-5)


def test_dual_clip_takes_the_gradient_of_bad_actions_far_away() -> None:
    log_ratio = torch.log(torch.tensor([0.5, 1.0, 2.9, 3.1, 100.0])).requires_grad_()
    advantage = torch.full((5,), -1.0)
    inputs = (torch.zeros(5), advantage, 0.2, 0.2)
    clipped_policy_loss(log_ratio, *inputs, 3.0).sum().backward()
    assert (log_ratio.grad != 0).tolist() == [False, True, True, False, False]
    assert clip_fraction(log_ratio, *inputs, 3.0).tolist() == [1, 0, 0, 1, 1]
    plain = clipped_policy_loss(log_ratio, *inputs)
    assert torch.equal(clipped_policy_loss(log_ratio, *inputs, 1e9), plain)
    good = clipped_policy_loss(log_ratio, torch.zeros(5), -advantage, 0.2, 0.2, 3.0)
    assert torch.equal(good, clipped_policy_loss(log_ratio, torch.zeros(5), -advantage, 0.2, 0.2))


def gaussians(n: int = 6, apart: float = 0.02) -> dict[str, Tensor]:
    """N transitions of an old and a present policy that share std, and the samples the old one drew."""
    mean_old, std = torch.randn(n, *SHAPE), torch.linspace(0.05, 0.4, n).view(n, 1, 1, 1)
    noise = torch.randn(n, *SHAPE)
    mean = mean_old + apart * torch.randn(n, *SHAPE)
    next = mean_old + std * noise
    return {
        "mean": mean,
        "mean_old": mean_old,
        "std": std,
        "noise": noise,
        "next": next,
        "log_prob": gaussian_log_prob(next, mean, std),
        "old_log_prob": gaussian_log_prob(next, mean_old, std),
    }


def guard(g: dict[str, Tensor]) -> Tensor:
    return guard_log_ratio(*(g[k] for k in ("log_prob", "old_log_prob", "mean", "mean_old", "std")))


def test_the_guarded_log_ratio_is_its_closed_form() -> None:
    """mean(noise * (mean - mean_old)): nothing of the step's std is left."""
    g = gaussians()
    expected = (g["noise"] * (g["mean"] - g["mean_old"])).flatten(1).mean(1)
    torch.testing.assert_close(guard(g), expected, atol=1e-6, rtol=1e-4)


def test_the_guarded_log_ratio_has_mean_zero_and_one_spread_at_all_steps() -> None:
    plain, guarded = [], []
    for _ in range(300):
        g = gaussians(apart=0.1)
        plain.append(g["log_prob"] - g["old_log_prob"])
        guarded.append(guard(g))
    plain, guarded = torch.stack(plain), torch.stack(guarded)
    assert (plain.mean(0)[0] < -1) and plain.std(0)[0] > 5 * plain.std(0)[-1]
    assert guarded.mean(0).abs().max() < 3 * guarded.std() / math.sqrt(300) + 1e-3
    assert guarded.std(0).max() < 1.3 * guarded.std(0).min()


def test_the_guarded_ratio_is_one_before_any_update_and_its_gradient_follows_the_advantage() -> None:
    g = gaussians(apart=0.0)
    mean = g["mean_old"].clone().requires_grad_()
    g |= {"mean": mean, "log_prob": gaussian_log_prob(g["next"], mean, g["std"])}
    log_ratio = guard(g)
    torch.testing.assert_close(log_ratio, torch.zeros(6), atol=1e-7, rtol=0)
    advantage = torch.tensor([1.0, -1.0] * 3)
    clipped_policy_loss(log_ratio, torch.zeros(6), advantage, 1e-5, 1e-5).sum().backward()
    # descent moves the mean to the sample where A > 0, away from it where A < 0
    towards = (-mean.grad * g["noise"]).flatten(1).sum(1)
    assert torch.equal(towards.sign(), advantage)


def test_dppo_drops_what_moves_away_and_is_too_far() -> None:
    cases = [
        # ratio, advantage, divergence, kept
        (1.1, 1.0, 2e-5, 0),
        (1.1, 1.0, 1e-5, 0),
        (1.1, 1.0, 0.5e-5, 1),
        (0.9, 1.0, 2e-5, 1),
        (0.9, -1.0, 2e-5, 0),
        (1.1, -1.0, 2e-5, 1),
        (1.0, 1.0, 2e-5, 1),
        (1.1, 0.0, 2e-5, 1),
    ]
    ratio, advantage, divergence, kept = torch.tensor(cases).unbind(1)
    ratio.requires_grad_()
    mask = dppo_mask(ratio, advantage, divergence, 1e-5)
    assert torch.equal(mask, kept) and not mask.requires_grad
    (-mask * advantage * ratio).sum().backward()
    torch.testing.assert_close(ratio.grad, -kept * advantage)


def test_noise_weights_are_tempflows() -> None:
    sigmas, eta = (
        torch.linspace(1, 0, 7),
        torch.tensor([[0.7, 0.7, 0.7, 0.7, 0.7, 0.0], [0.0, 0.7, 0.0, 0.7, 0.0, 0.0]]),
    )
    weight = noise_weight(step_std(flow_sde, sigmas, eta), eta > 0)
    for row in range(2):
        stds = {}
        for k in range(6):
            if eta[row, k] > 0:
                s, s_next = sigmas[k].item(), sigmas[k + 1].item()
                stds[k] = 0.7 * math.sqrt(s / (1 - (s_next if k == 0 else s))) * math.sqrt(s - s_next)
        average = sum(stds.values()) / len(stds)
        expected = torch.tensor([stds.get(k, 0.0) / average for k in range(6)])
        torch.testing.assert_close(weight[row], expected, atol=1e-5, rtol=1e-4)
        assert weight[row, eta[row] > 0].mean().item() == pytest.approx(1, rel=1e-5)


def test_divergences_against_torch_distributions() -> None:
    g = gaussians()
    old, new = (Normal(g[k], g["std"].expand_as(g[k])) for k in ("mean_old", "mean"))
    expected = kl_divergence(new, old).flatten(1).mean(1)
    torch.testing.assert_close(gaussian_kl(g["mean"], g["mean_old"], g["std"]), expected, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(gaussian_entropy(g["std"]), new.entropy().flatten(1).mean(1))


def test_velocity_mse_is_the_kl_up_to_a_factor_of_the_step() -> None:
    """The means of two ODE-like steps are (v - v_ref) dt apart."""
    v, reference, dt, std = torch.randn(5, *SHAPE), torch.randn(5, *SHAPE), -0.1, torch.full((5, 1, 1, 1), 0.3)
    mse = velocity_mse(v, reference)
    torch.testing.assert_close(mse, ((v - reference) ** 2).mean((1, 2, 3)))
    torch.testing.assert_close(gaussian_kl(v * dt, reference * dt, std), mse * dt**2 / (2 * 0.3**2))
