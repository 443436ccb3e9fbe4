"""Advantages from several rewards: each normalised by itself before they are one, or one that weighs another."""

from typing import Literal

import torch
from torch import Tensor

from flowalign.core.groups import Positive, Scale, declares, first_rows, group_advantage, group_mean_std
from flowalign.core.record import Record


@declares("rewards")
def diverse(record: Record, *, by: str = "group_diversity", clip: Positive | None = None) -> Tensor:
    """GARDO (arXiv 2512.24138): (r - mean_g) d, where d favours good members that are unlike the others of their group.

    d is the reward `by`, over its mean in the group, where r is at or above the group's mean, and 1 elsewhere.
    """
    mean, _ = group_mean_std(record.reward, record.group)
    distance = record.reward_of(by)
    typical, _ = group_mean_std(distance, record.group)
    unlike = torch.where((record.reward < mean) | (typical == 0), 1, distance / typical)
    advantage = (record.reward - mean) * unlike
    return advantage if clip is None else advantage.clamp(-clip, clip)


@declares("rewards")
def per_reward(
    record: Record,
    *,
    scale: Scale = "group",
    clip: Positive | None = None,
    eps: Positive = 1e-4,
    unbiased: bool = False,
) -> Tensor:
    """Each reward normalised in its group, then their weighted sum (DanceGRPO, MixGRPO).

    Rewards of different spread keep their say, which the spread of a weighted sum of rewards takes from them.

    Args:
        clip: bound on the sum.
    """
    weighted = [
        weight * group_advantage(reward, record.group, scale, eps=eps, unbiased=unbiased)
        for weight, reward in zip(record.reward_weights, record.rewards, strict=True)
    ]
    # a reward that does not apply to a row is NaN there
    total = torch.stack(weighted).nansum(0)
    return total if clip is None else total.clamp(-clip, clip)


@declares("rewards")
def gdpo(
    record: Record,
    *,
    scale: Scale = "group",
    clip: Positive | None = None,
    eps: Positive = 1e-4,
    unbiased: bool = False,
    over: Literal["rows", "actions"] = "rows",
) -> Tensor:
    """GDPO (arXiv 2601.05242): `per_reward`, brought to mean 0 and standard deviation 1 over the batch.

    Args:
        over: over the batch's rows, as in TRL, or over its actions, so that a long row counts more, as in verl.
    """
    total = per_reward(record, scale=scale, eps=eps, unbiased=unbiased)
    if over == "actions":
        each = total[:, None].expand(record.mask.shape)[record.mask]
        whitened = (total - each.mean()) * (each.var() + 1e-8).rsqrt()
        return whitened if clip is None else whitened.clamp(-clip, clip)
    return group_advantage(total, torch.zeros_like(record.group), clip=clip, eps=eps, unbiased=unbiased)


@declares("rewards")
def bnpo(record: Record, *, largest: Positive = 1e6) -> Tensor:
    """BNPO (arXiv 2506.02864): (r - p) / Beta(p; alpha, beta), p the group's success rate, rewards in [0, 1].

    alpha and beta follow from mean and variance of p over the batch's groups. Several rewards are each
    normalised and summed (the paper's advantage decomposition). GRPO is alpha = beta = 3/2 up to a factor.

    Args:
        largest: bound on 1 / Beta(p).
    """
    advantages = [_beta_normalised(reward, record.group, largest) for reward in record.rewards]
    return torch.stack([weight * each for weight, each in zip(record.reward_weights, advantages, strict=True)]).sum(0)


def _beta_normalised(reward: Tensor, group: Tensor, largest: float) -> Tensor:
    rate, _ = group_mean_std(reward, group)
    if reward.min() < 0 or reward.max() > 1:
        raise ValueError("bnpo takes rewards in [0, 1]; rescaled brings others there")
    _, first = first_rows(group)
    rates = rate[first]
    mean = rates.mean() if len(rates) > 1 else rates.new_tensor(0.0)
    variance = rates.var().clamp(min=1e-6) if len(rates) > 1 else rates.new_tensor(1.0)
    surplus = mean * (1 - mean) / variance - 1
    alpha = (1 + surplus * mean / 3).clamp(min=1)
    beta = (1 + surplus * (1 - mean) / 3).clamp(min=1)
    density = torch.distributions.Beta(alpha, beta).log_prob(rate).exp()
    return (reward - rate) * (1 / density).clamp(max=largest)
