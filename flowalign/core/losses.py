"""Policy losses, one value an action: pure functions on arrays of any one shape, usually [B, T] or [N]."""

import torch
from torch import Tensor


def clipped_policy_loss(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """PPO's clipped surrogate -min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(log_prob - old_log_prob).

    arXiv 1707.06347, eq. 7. For denoising steps log_prob is a mean over elements, hence published clip ranges
    of 1e-5 to 1e-3 (Flow-GRPO, arXiv 2505.05470).
    """
    ratio = torch.exp(log_prob - old_log_prob)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(-advantage * ratio, -advantage * clipped)


def clip_fraction(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """1 where the clip takes the gradient away, 0 elsewhere."""
    ratio = torch.exp(log_prob - old_log_prob)
    high = (advantage > 0) & (ratio > 1 + clip_high)
    low = (advantage < 0) & (ratio < 1 - clip_low)
    return (high | low).float()
