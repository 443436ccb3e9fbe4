"""Divergences against torch.distributions and closed forms."""

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from flowalign.core.divergences import gaussian_entropy, gaussian_kl, sampled_kl, velocity_mse

SHAPE = (4, 6, 6)


def test_kl_is_that_of_torch_distributions_averaged_over_elements() -> None:
    mean, reference, std = torch.randn(5, 3, 2, 2), torch.randn(5, 3, 2, 2), torch.rand(5, 1, 1, 1) + 0.1
    normal = torch.distributions.Normal
    expected = torch.distributions.kl_divergence(
        normal(mean, std.expand_as(mean)), normal(reference, std.expand_as(mean))
    )
    torch.testing.assert_close(gaussian_kl(mean, reference, std), expected.flatten(1).mean(1))
    assert not gaussian_kl(mean, mean, std).any()


def test_divergences_against_torch_distributions() -> None:
    mean, mean_old, std = torch.randn(6, *SHAPE), torch.randn(6, *SHAPE), torch.linspace(0.05, 0.4, 6).view(6, 1, 1, 1)
    old, new = (Normal(m, std.expand_as(m)) for m in (mean_old, mean))
    torch.testing.assert_close(gaussian_kl(mean, mean_old, std), kl_divergence(new, old).flatten(1).mean(1))
    torch.testing.assert_close(gaussian_entropy(std), new.entropy().flatten(1).mean(1))


def test_velocity_mse_is_the_kl_up_to_a_factor_of_the_step() -> None:
    """The means of two ODE-like steps are (v - v_ref) dt apart."""
    v, reference, dt, std = torch.randn(5, *SHAPE), torch.randn(5, *SHAPE), -0.1, torch.full((5, 1, 1, 1), 0.3)
    mse = velocity_mse(v, reference)
    torch.testing.assert_close(mse, ((v - reference) ** 2).mean((1, 2, 3)))
    torch.testing.assert_close(gaussian_kl(v * dt, reference * dt, std), mse * dt**2 / (2 * 0.3**2))


def test_kl_estimates_have_the_expected_values_and_gradients() -> None:
    """Over all actions of a categorical distribution, weighted by their probability: k1 and k3 give the KL, k2 its
    gradient."""
    logits, reference = torch.randn(7, requires_grad=True), torch.randn(7)
    log_p, log_q = logits.log_softmax(0), reference.log_softmax(0)
    exact = (log_p.exp() * (log_p - log_q)).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    for estimator in ("k1", "k3"):
        mean = (log_p.exp() * sampled_kl(log_p, log_q, estimator)).sum()
        assert mean.item() == pytest.approx(exact.item(), abs=1e-6)
    drawn = (log_p.exp().detach() * sampled_kl(log_p, log_q, "k2")).sum()
    torch.testing.assert_close(torch.autograd.grad(drawn, logits, retain_graph=True)[0], expected)
    assert (sampled_kl(log_p, log_q, "k3") >= 0).all()
    # k3 has another expected gradient; times the ratio, the KL's
    ratio = (log_p - log_p.detach()).exp()
    corrected = (log_p.exp().detach() * sampled_kl(log_p, log_q, "k3") * ratio).sum()
    torch.testing.assert_close(torch.autograd.grad(corrected, logits, retain_graph=True)[0], expected)
    assert sampled_kl(log_p - 200, log_q, "k3").isfinite().all()


def test_verls_low_var_kl_is_k3_up_to_10() -> None:
    log_prob = torch.tensor([-25.0, -3.0, -1.0, -0.5], requires_grad=True)
    reference = torch.tensor([-1.0, -1.0, -2.0, -0.5])
    difference = (reference - log_prob).detach().double().clamp(-20, 20)
    expected = (difference.exp() - difference - 1).clamp(-10, 10)
    made = sampled_kl(log_prob, reference, "low_var_kl")
    torch.testing.assert_close(made.detach().double(), expected)
    made.sum().backward()
    assert log_prob.grad is not None and (log_prob.grad == 0).tolist() == [True, False, False, True]
    assert sampled_kl(log_prob, reference, "k3")[0] > 1e8
