"""Advantages and losses that heed how uncertain the policy was: pure functions on [B, T] arrays."""

import torch
from torch import Tensor

from flowalign.core.record import by_turn


def entropy_modulated(
    advantage: Tensor,
    entropy: Tensor,
    mask: Tensor,
    sharpness: float = 1.0,
    clarity: float = 0.05,
    clarity_sharpness: float = 1.0,
    turn: Tensor | None = None,
) -> Tensor:
    """EMPG (arXiv 2509.09265, eq. 8 to 12): A g(H_k) + clarity * f(H_{k+1}), brought to mean 0 over the batch's steps.

    With H in [0, 1] over the batch (minimum and maximum): g = exp(-sharpness H), divided by its mean, raises confident
    steps and damps uncertain ones; f = exp(-clarity_sharpness H) of the next step favours ways to clear states.

    A step is a turn, its entropy the mean over the turn's tokens, as published. Departure: without turns every action
    is a step.

    Args:
        advantage, entropy: [B, T].
        mask: [B, T] bool.
        turn: [B, T] integers from 0, as of `Record`.
    """
    steps = by_turn(turn, mask)
    count = steps.sum(torch.ones_like(entropy))
    taken = count > 0
    mean = steps.sum(entropy) / count.clamp(min=1)
    low, high = mean[taken].min(), mean[taken].max()
    level = (mean - low) / (high - low).clamp(min=1e-8)
    scale = torch.exp(-sharpness * level)
    scale = scale / scale[taken].mean()
    following = torch.zeros_like(level)
    following[:, :-1] = torch.exp(-clarity_sharpness * level[:, 1:]).where(taken[:, 1:], 0)
    modulated = advantage * steps.spread(scale) + clarity * steps.spread(following)
    return (modulated - (steps.sum(modulated) / count.clamp(min=1))[taken].mean()).where(mask, 0)


def uncertain(entropy: Tensor, mask: Tensor, share: float) -> Tensor:
    """The `share` of the batch's actions that were drawn with most entropy: [B, T] bool, all False without actions.

    Only they learn (the top fifth in arXiv 2506.01939; EARL, 2511.12033; TRL's top_entropy_quantile). EARL's own rule
    was not at hand beyond its abstract, which gates by entropy too.
    """
    if share >= 1 or not mask.any():
        return mask
    return mask & (entropy >= torch.quantile(entropy[mask].float(), 1 - share))


def regulating_temperature(entropy: float, target: float, high: float = 1.2, low: float = 0.8) -> float:
    """AEPO (arXiv 2510.08141, and the authors' code): the temperature of extra samples, the right ones among which get
    REINFORCE with advantage 1.

    They raise the entropy where it is below its target, and lower it where above.
    """
    return high if entropy <= target else low


def unlikeliness(reward: Tensor, log_prob: Tensor, group: Tensor, penalty: float = 0.25) -> Tensor:
    """Rewards r (1 - penalty * rank / G), rank 0 for a group's least likely member (arXiv 2506.02355).

    What is right but unlikely keeps its reward, so that the policy does not only sharpen what it does anyway.

    Args:
        reward: [B], 0 for what is wrong.
        log_prob: [B] mean over the row's actions when they were drawn.
        group: [B] integers.
    """
    same = group[:, None] == group
    row = torch.arange(len(group), device=group.device)
    below = (log_prob[:, None] > log_prob) | ((log_prob[:, None] == log_prob) & (row < row[:, None]))
    rank = (same & below).sum(1)
    return reward * (1 - penalty * rank / same.sum(1))
