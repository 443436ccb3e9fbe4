"""Parts of the losses of denoising steps, of pairs and of groups of pictures; no configuration names them."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from flowalign.core.divergences import gaussian_kl


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
        divergence: [N], of the transition from the sampling weights' transition: `gaussian_kl(mean, mean_old, std)`.
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
            for a generator the difference of its implicit rewards (Diffusion-DPO, arXiv 2311.12908, eq. 14).
    """
    return -F.logsigmoid(logit)


def step_preference_loss(chosen: Tensor, rejected: Tensor, beta: float, clip_range: float) -> tuple[Tensor, Tensor]:
    """Bradley and Terry's loss of one denoising step that is preferred to another (D3PO, arXiv 2311.13231).

    An implicit reward is beta times the log-ratio to the reference, the ratio clamped to 1 +- clip_range: outside it
    has no gradient. At ratios of 1 the gradient is -beta / 2 (grad chosen - grad rejected).

    Args:
        chosen, rejected: [N] log-ratios of the two steps, of log-probabilities that are means over elements.

    Returns:
        the losses [N], and the logits that they come from.
    """
    low, high = math.log1p(-clip_range), math.log1p(clip_range)
    logit = beta * (chosen.clamp(low, high) - rejected.clamp(low, high))
    return preference_loss(logit), logit


def reward_difference_loss(
    reward: Tensor, log_ratio: Tensor, old_log_ratio: Tensor, beta: float, clip_range: float
) -> Tensor:
    """PRDP's regression of the difference of two rewards, proximal (after the abstract of arXiv 2402.08714).

    The maximiser of the reward under beta times the KL from the reference has reward = beta * log-ratio + a constant of
    the prompt, so that its log-ratios predict differences: (r_0 - r_1 - beta (rho_0 - rho_1))^2 with the trajectories'
    log-ratios rho, sums over steps. Where all steps' log-ratios, clamped to clip_range around the sampling
    weights' own, predict worse, it is their error: there is nothing to gain by going further.

    Args:
        reward: [N, 2].
        log_ratio: [N, 2, T] of each step to the reference, means over elements.
        old_log_ratio: [N, 2, T] under the weights that sampled.

    Returns:
        [N].
    """

    def error(log_ratio: Tensor) -> Tensor:
        left = reward - beta * log_ratio.sum(2)
        return (left[:, 0] - left[:, 1]) ** 2

    near = old_log_ratio + (log_ratio - old_log_ratio).clamp(-clip_range, clip_range)
    return torch.maximum(error(log_ratio), error(near))


def group_preference_loss(
    error: Tensor, other: Tensor, advantage: Tensor, size: int, beta: float, still: Tensor
) -> tuple[Tensor, Tensor]:
    """A group as a preference between its good and its bad members (DGPO, arXiv 2510.08425).

    The group's weight is the chance that the errors, compared with others, have the preference the wrong way round.

    Args:
        error: [N] of the members, group after group.
        other: [N] the errors that they are compared with.
        advantage: [N].
        size: members of a group.
        still: [N] bool: members without a gradient of their own, which count in their group's weight all the same.

    Returns:
        [N] losses, and [N] the weights of their groups.
    """
    wrong = (advantage * (error - other)).detach().view(-1, size).mean(1)
    weight = (beta * wrong).sigmoid().repeat_interleave(size)
    return weight * advantage * torch.where(still, error.detach(), error), weight


def has_moved(error: Tensor, error_old: Tensor, advantage: Tensor, clip_range: float) -> Tensor:
    """[N] bool: the samples whose ratio exp(e_old - e) is beyond 1 +- clip_range in their advantage's direction."""
    ratio = (error_old - error).detach().exp()
    return torch.where(advantage > 0, ratio > 1 + clip_range, ratio < 1 - clip_range)
