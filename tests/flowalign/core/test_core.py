"""Advantages, losses and divergences against literal loops and torch.distributions."""

import math

import pytest
import torch

from flowalign.core.advantages import group_advantage, group_mean_std, zero_spread
from flowalign.core.divergences import gaussian_kl
from flowalign.core.losses import clip_fraction, clipped_policy_loss

GROUP = torch.tensor([7, 2, 7, 2, 2, 9, 7, 9])
"""interleaved, of different sizes, not counted from 0"""


def literal_advantage(reward: list[float], scale: str, eps: float = 1e-4) -> list[float]:
    advantages = []
    for r, g in zip(reward, GROUP.tolist(), strict=True):
        members = [other for other, h in zip(reward, GROUP.tolist(), strict=True) if h == g]
        mean = sum(members) / len(members)
        pool = {"group": members, "batch": reward, "none": None}[scale]
        divisor = 1.0
        if pool is not None:
            centre = sum(pool) / len(pool)
            divisor = math.sqrt(sum((p - centre) ** 2 for p in pool) / len(pool)) + eps
        advantages.append((r - mean) / divisor)
    return advantages


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_those_of_a_loop_over_groups(scale: str) -> None:
    reward = torch.randn(8)
    expected = torch.tensor(literal_advantage(reward.tolist(), scale))
    torch.testing.assert_close(group_advantage(reward, GROUP, scale), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_dense_rewards_are_normalised_for_each_step_on_its_own(scale: str) -> None:
    reward = torch.randn(8, 3) * torch.tensor([1.0, 5.0, 0.1])
    columns = [group_advantage(reward[:, t], GROUP, scale) for t in range(3)]
    torch.testing.assert_close(group_advantage(reward, GROUP, scale), torch.stack(columns, 1))


def test_advantages_are_clipped_on_both_sides() -> None:
    reward, group = torch.tensor([0.0] * 50 + [1.0] + [0.0] + [-1.0]), torch.zeros(53, dtype=torch.long)
    free, clipped = group_advantage(reward, group), group_advantage(reward, group, clip=3.0)
    assert free.max() > 3 and free.min() < -3
    assert torch.equal(clipped, free.clamp(-3, 3))


def test_a_group_of_one_reward_teaches_nothing() -> None:
    reward = torch.tensor([0.3, 0.5, 0.3, 0.7, 0.1, 1.0, 0.3, 1.0])
    advantage = group_advantage(reward, GROUP)
    assert (advantage[GROUP == 7].abs() < 1e-3).all() and (advantage[GROUP == 9] == 0).all()
    assert zero_spread(reward, GROUP).item() == pytest.approx(5 / 8)
    assert zero_spread(reward[:, None].expand(-1, 2), GROUP).item() == pytest.approx(5 / 8)
    # a group whose steps are not all alike teaches something
    dense = torch.stack([reward, torch.arange(8.0)], 1)
    assert zero_spread(dense, GROUP).item() == 0


def test_group_statistics_do_not_depend_on_the_order_of_the_rows() -> None:
    reward, order = torch.randn(8), torch.randperm(8)
    mean, std = group_mean_std(reward, GROUP)
    again_mean, again_std = group_mean_std(reward[order], GROUP[order])
    torch.testing.assert_close(again_mean, mean[order])
    torch.testing.assert_close(again_std, std[order])


def test_the_clipped_loss_is_that_of_a_loop() -> None:
    log_prob, old, advantage = torch.randn(5, 4) * 0.3, torch.randn(5, 4) * 0.3, torch.randn(5, 4)
    low, high = 0.1, 0.25
    expected, cut = torch.zeros(5, 4), torch.zeros(5, 4)
    for b in range(5):
        for t in range(4):
            a = advantage[b, t].item()
            ratio = math.exp(log_prob[b, t].item() - old[b, t].item())
            expected[b, t] = -min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
            cut[b, t] = (a > 0 and ratio > 1 + high) or (a < 0 and ratio < 1 - low)
    torch.testing.assert_close(clipped_policy_loss(log_prob, old, advantage, low, high), expected)
    assert torch.equal(clip_fraction(log_prob, old, advantage, low, high), cut)
    assert 0 < cut.mean() < 1


def test_the_clip_fraction_counts_the_actions_without_gradient() -> None:
    log_prob = (torch.randn(200) * 0.3).requires_grad_()
    old, advantage = torch.zeros(200), torch.randn(200)
    clipped_policy_loss(log_prob, old, advantage, 0.1, 0.2).sum().backward()
    assert torch.equal(log_prob.grad == 0, clip_fraction(log_prob, old, advantage, 0.1, 0.2).bool())


def test_on_policy_the_loss_has_the_gradient_of_plain_policy_gradient() -> None:
    log_prob, advantage = torch.randn(6, requires_grad=True), torch.randn(6)
    clipped_policy_loss(log_prob, log_prob.detach(), advantage, 1e-4, 1e-4).sum().backward()
    torch.testing.assert_close(log_prob.grad, -advantage)


def test_kl_is_that_of_torch_distributions_averaged_over_elements() -> None:
    mean, reference, std = torch.randn(5, 3, 2, 2), torch.randn(5, 3, 2, 2), torch.rand(5, 1, 1, 1) + 0.1
    normal = torch.distributions.Normal
    expected = torch.distributions.kl_divergence(
        normal(mean, std.expand_as(mean)), normal(reference, std.expand_as(mean))
    )
    torch.testing.assert_close(gaussian_kl(mean, reference, std), expected.flatten(1).mean(1))
    assert not gaussian_kl(mean, mean, std).any()


def test_the_core_imports_neither_diffusers_nor_transformers() -> None:
    import subprocess
    import sys

    modules = "advantages, divergences, losses"
    code = (
        f"import sys; from flowalign.core import {modules}; print({{'diffusers', 'transformers'}} & set(sys.modules))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "set()"
