"""What states are worth, and how much of it lasts."""

import numpy as np
import torch

from flowalign.rollouts.dense import persistence


def test_persistence_is_the_correlation_within_groups():
    rng = np.random.default_rng(0)
    group = torch.arange(40).repeat_interleave(8)
    # groups differ far more than their members do, which must not count
    offset = torch.from_numpy(rng.normal(0, 10, 40))[group]
    final = torch.from_numpy(rng.normal(size=320))
    half = 0.5 * final + torch.from_numpy(rng.normal(size=320))
    values = torch.stack([offset, offset + half, offset + final, offset + final], 1)
    lasting = persistence(values, group)
    literal = np.concatenate([[h - h.mean(), f - f.mean()] for h, f in zip(half.view(40, 8), final.view(40, 8))], 1)
    assert torch.isnan(lasting[0])
    np.testing.assert_allclose(lasting[1], np.corrcoef(literal)[0, 1], atol=1e-9)
    np.testing.assert_allclose(lasting[2:], 1.0, atol=1e-9)


def test_a_gain_is_noisier_than_the_final_reward_where_persistence_is_below_one_half():
    generator = torch.Generator().manual_seed(0)
    group = torch.zeros(20_000, dtype=torch.long)
    final = torch.randn(20_000, generator=generator)
    for correlation in (0.3, 0.7):
        state = correlation * final + (1 - correlation**2) ** 0.5 * torch.randn(20_000, generator=generator)
        lasting = persistence(torch.stack([state, final], 1), group)[0]
        assert ((final - state).var() > final.var()) == (lasting < 0.5)
