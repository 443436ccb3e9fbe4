"""Policy losses, one value an action: pure functions on arrays of any one shape, usually [B, T] or [N]."""

import torch
from torch import Tensor
from torch.nn import functional as F

from flowalign.core.divergences import gaussian_kl


def clipped_policy_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    clip_low: float,
    clip_high: float,
    dual: float | None = None,
) -> Tensor:
    """PPO's clipped surrogate -min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(log_prob - old_log_prob).

    arXiv 1707.06347, eq. 7. For denoising steps log_prob is a mean over elements, hence published clip ranges
    of 1e-5 to 1e-3 (Flow-GRPO, arXiv 2505.05470).

    Args:
        dual: > 1, bound -dual * A on the loss of negative advantages, whose ratio the plain clip leaves without
            one (dual-clip PPO, arXiv 1912.09729, eq. 5).
    """
    ratio = torch.exp(log_prob - old_log_prob)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-advantage * ratio, -advantage * clipped)
    if dual is None:
        return loss
    return torch.where(advantage < 0, torch.minimum(loss, -dual * advantage), loss)


def clip_fraction(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    clip_low: float,
    clip_high: float,
    dual: float | None = None,
) -> Tensor:
    """1 where the clip takes the gradient away, 0 elsewhere."""
    ratio = torch.exp(log_prob - old_log_prob)
    high = (advantage > 0) & (ratio > 1 + clip_high)
    low = (advantage < 0) & (ratio < 1 - clip_low)
    clipped = high | low
    if dual is not None:
        clipped = clipped | ((advantage < 0) & (ratio > dual))
    return clipped.float()


def guard_log_ratio(log_prob: Tensor, old_log_prob: Tensor, mean: Tensor, mean_old: Tensor, std: Tensor) -> Tensor:
    """GRPO-Guard's regulated log-ratio (log_prob - old + b) * std, b = mean((mean - mean_old)^2) / (2 std^2).

    arXiv 2510.22319 (RatioNorm). The plain log-ratio is -b on average, and the narrower the step's Gaussian the
    wider it spreads; this one is mean(noise * (mean - mean_old)), alike at every step. Its scale is therefore that
    of the means: clip at about 1e-6 to 1e-5, and divide the loss by -dt as published (for `cps` there is no such
    derivation). Gradients flow through b. Only for Gaussian log-probabilities.

    Args:
        log_prob, old_log_prob: [N].
        mean, mean_old: [N, ...] of the transition under the present and the sampling weights.
        std: [N, 1, ...], one a sample.

    Returns:
        [N], to be used as `clipped_policy_loss(log_ratio, zeros_like(log_ratio), ...)`.
    """
    return (log_prob - old_log_prob + gaussian_kl(mean, mean_old, std)) * std.flatten()


def dppo_mask(ratio: Tensor, advantage: Tensor, divergence: Tensor, threshold: float) -> Tensor:
    """Flow-DPPO's trust region (arXiv 2606.11025): 0 where a step moves away and is too far already, else 1.

    It moves away where A > 0 and ratio > 1, or A < 0 and ratio < 1. The loss is -mask * A * ratio without a clip,
    its mean over all terms. Published threshold: 1e-5, for divergences that are means over elements.

    Args:
        ratio, advantage: [N].
        divergence: [N], of the transition from that of the sampling weights: `gaussian_kl(mean, mean_old, std)`.
        threshold: the divergence from which on a step may not move away any more.

    Returns:
        [N] of 0 and 1 without gradient.
    """
    away = advantage * (ratio - 1) > 0
    return (~(away & (divergence >= threshold))).to(ratio.dtype)


def noise_weight(std: Tensor, mask: Tensor) -> Tensor:
    """TempFlow-GRPO's weight of each step's loss, its std over the mean std of the stochastic steps (2508.04324).

    Args:
        std: [B, T] of the transitions, `samplers.step_std`.
        mask: [B, T] bool, the stochastic steps; at least one a row.

    Returns:
        [B, T] with mean 1 over the stochastic steps of a row, 0 at the others.
    """
    std = std * mask
    return std * mask.sum(1, keepdim=True) / std.sum(1, keepdim=True)


def preference_loss(logit: Tensor) -> Tensor:
    """Minus the log-probability that the chosen one of a pair wins, by Bradley and Terry's model; log 2 at logit 0.

    Args:
        logit: how much more the chosen one is worth than the rejected one. For a reward the difference of its scores;
            for a generator that of its implicit rewards (Diffusion-DPO, arXiv 2311.12908, eq. 14).
    """
    return -F.logsigmoid(logit)
