"""Weights for actions that another policy drew than the one the ratio is taken with: an engine of other numerics."""

from typing import Literal

import torch
from torch import Tensor

from flowalign.core.record import LARGEST_LOG_RATIO, masked_sum

Level = Literal["token", "sequence"]
Rule = Literal["truncate", "mask"]


def correction(
    old_log_prob: Tensor,
    sampler_log_prob: Tensor,
    mask: Tensor,
    *,
    level: Level = "token",
    rule: Rule = "truncate",
    largest: float = 2.0,
    smallest: float = 0.0,
) -> Tensor:
    """Importance weights pi_old / pi_sampler, bounded: [B, T] for 'token', [B, 1] for 'sequence'.

    Truncated importance sampling clamps them to [smallest, largest]; masked importance sampling sets those outside
    to 0 (Yao et al. 2025, and TRL's vllm_importance_sampling_mode). They multiply the losses, without gradient.

    Args:
        old_log_prob, sampler_log_prob: [B, T] of the same actions under the two.
        mask: [B, T] bool.
        level: a weight for each action, or the product over the row's for all of them.
    """
    difference = torch.where(mask, old_log_prob - sampler_log_prob, 0)
    log_ratio = difference if level == "token" else masked_sum(difference, mask)[:, None]
    ratio = log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    if rule == "truncate":
        return ratio.clamp(smallest, largest)
    return ratio.where((ratio >= smallest) & (ratio <= largest), 0)


def kept(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """The off-policy sequence mask (DeepSeek-V3.2, arXiv 2512.02556): [N, T] bool, without gradient.

    A row that became less probable by more than the threshold, in nats an action, does not learn from a negative
    advantage, which would push it further. TRL's off_policy_mask_threshold.
    """
    fallen = masked_sum(old_log_prob - log_prob.detach(), mask) / mask.sum(1).clamp(min=1)
    return (advantage >= 0) | (fallen <= threshold)[:, None]
