"""GRPO's advantages, reshaped: by rank, by how sure a text was, by where a token stands, by what its group says."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from flowalign.core.groups import Positive, Share, declares, first_rows, group_advantage, group_mean_std
from flowalign.core.record import Record, masked_mean

Count = Annotated[int, Field(ge=0)]


def filtered(
    record: Record, *, best: Count = 1, worst: Count = 1, eps: Positive = 1e-4, unbiased: bool = True
) -> Tensor:
    """PF-PPO's filter (arXiv 2409.06957): only a group's best and worst learn, where reward models are reliable.

    Advantages are GRPO's of the whole group, 0 for the members in between. `reliability` tells which ranks of a reward
    model to trust. Departure: the paper filters samples for PPO with a critic. Ties: the earlier member is better.
    """
    rank, size = ranks(record.reward, record.group)
    advantage = group_advantage(record.reward, record.group, eps=eps, unbiased=unbiased)
    return advantage.where((rank < best) | (rank >= size - worst), 0)


def reliability(reward: Tensor, truth: Tensor, group: Tensor, best: int, worst: int) -> Tensor:
    """R^2 of the line from rewards to true scores over the members that `filtered` keeps: a scalar.

    Args:
        reward: [B] of the reward model.
        truth: [B], such as a verifier's verdicts.
        group: [B] integers.
    """
    rank, size = ranks(reward, group)
    kept = (rank < best) | (rank >= size - worst)
    pair = torch.stack([reward[kept], truth[kept]])
    return torch.corrcoef(pair)[0, 1] ** 2


def ranks(reward: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """[B] place of each row in its group, 0 the best, and the size of its group."""
    same, row = group[:, None] == group, torch.arange(len(group), device=group.device)
    better = (reward > reward[:, None]) | ((reward == reward[:, None]) & (row < row[:, None]))
    return (same & better).sum(1), same.sum(1)


def three_sigma(record: Record, *, largest: Positive = 3.0, eps: Positive = 1e-4, unbiased: bool = True) -> Tensor:
    """StableReinforce's advantage filter (arXiv 2505.02835): GRPO's, 0 beyond `largest` standard deviations.

    The rest of the method: `loss: {name: ppo, largest_ratio: 1000}` and the template `text_consistent`.
    """
    advantage = group_advantage(record.reward, record.group, eps=eps, unbiased=unbiased)
    known = advantage[~advantage.isnan()]
    apart = (advantage - known.mean()).abs()
    return advantage.where(apart <= largest * known.std(correction=0), 0)


def confident_late(
    record: Record,
    *,
    perplexity: Share = 0.01,
    position: Share = 0.1,
    steepness: Positive = 5.0,
    eps: Positive = 1e-4,
    unbiased: bool = True,
) -> Tensor:
    """GRPO's advantages, more of texts of low perplexity and of late tokens (after the abstract of arXiv 2508.02260).

    A (1 - perplexity z) + position sign(A) sigmoid(steepness (2 u - 1)): z is the log-perplexity of the text,
    standardised over the iteration, u the token's place in its text from 0 to 1. The abstract has no formula. -> [B, T]
    """
    mask = record.mask
    advantage = group_advantage(record.reward, record.group, eps=eps, unbiased=unbiased)
    log_perplexity = -masked_mean(record.log_prob, mask)
    z = (log_perplexity - log_perplexity.mean()) / (log_perplexity.std(correction=0) + 1e-8)
    place = (mask.cumsum(1) - 1) / (mask.sum(1, keepdim=True) - 1).clamp(min=1)
    bonus = position * (steepness * (2 * place - 1)).sigmoid()
    return ((advantage * (1 - perplexity * z))[:, None] + advantage.sign()[:, None] * bonus).where(mask, 0)


def value_smoothed(
    record: Record,
    *,
    hard: Share = 0.5,
    low: Share = 0.5,
    high: Positive = 1.5,
    eps: Positive = 1e-4,
    unbiased: bool = True,
) -> Tensor:
    """GRPO's advantages, each group's times its value over the mean value, within [low, high] (VSPO's smoothing clip,
    after the abstract of arXiv 2512.07478, which has no formula).

    The value of a group is 4 p (1 - p) + hard (1 - p) of its mean reward p in [0, 1], as of the selection `valued`,
    which draws valuable prompts again. Groups without spread, whose advantages are 0, are not in the mean.
    """
    advantage = group_advantage(record.reward, record.group, eps=eps, unbiased=unbiased)
    rate, spread = group_mean_std(record.reward, record.group)
    value = 4 * rate * (1 - rate) + hard * (1 - rate)
    teaching = first_rows(record.group)[1]
    teaching = teaching[spread[teaching] > 0]
    if not len(teaching):
        return advantage
    return advantage * (value / value[teaching].mean().clamp(min=eps)).clamp(low, high)


@declares("rewards")
def copo(record: Record, *, by: str = "frequency", middle: float = 0.5, sharpness: float = 1.0) -> Tensor:
    """COPO (arXiv 2508.04138, and the authors' code): where a group agrees, groups are compared with one another.

    w A + (1 - w) A_global: A is GRPO's, A_global the group's mean reward standardised over the groups, and w =
    sigmoid(sharpness (H - middle)) with the entropy H, in bits, of the group's answers; w is 0 where A is 0, as in
    groups that are all right or all wrong. Departure: the authors blend the two clipped losses, which is the same on
    the weights that sampled. Without their option that lowers a group's mean by its entropy.

    Args:
        by: name of a reward that is the share of the group that gives a text's answer: `frequency`, of weight 0.
    """
    group = record.group
    local = group_advantage(record.reward, group, eps=1e-6, unbiased=True)
    share = record.reward_of(by)
    size = (group[:, None] == group).sum(1)
    entropy, _ = group_mean_std(-share.clamp(min=1 / size).log2(), group)
    mean, _ = group_mean_std(record.reward, group)
    _, first = first_rows(group)
    spread = mean[first].std() if len(first) > 1 else mean.new_ones(())
    across = (mean - mean[first].mean()) / (spread + 1e-6)
    weight = (sharpness * (entropy - middle)).sigmoid() * (local != 0)
    return weight * local + (1 - weight) * across


@declares(dense=True)
def anchored(
    record: Record, *, anchor: Share = 0.1, first: Count = 5, eps: Positive = 1e-4, unbiased: bool = False
) -> Tensor:
    """VGPO's dual advantage (arXiv 2512.12387): w_t ((Q - mean_g) / (std_g + eps) + anchor Q), Q the value of a step.

    w_t is a group's mean Q at step t over its mean of all steps, so that a step weighs by what is at stake. The anchor
    remains where members get one and the same reward. Its share of a group's spread is the paper's alpha = anchor std,
    which the division by std leaves whole. -> [B, T]; of a reward [B], one value a trajectory, w is 1.

    Args:
        record: with values of steps [B, T] from 0 on.
        first: number of first steps that have the anchor; published: 5 of 10.
    """
    value, mask = record.reward, record.mask
    if value[~value.isnan()].min() < 0:
        raise ValueError(
            "anchored takes rewards from 0 on, whose size says what a step is worth; rescaled brings others"
        )
    if value.dim() == 1:
        value = value[:, None].expand_as(record.log_prob)
    mean, _ = group_mean_std(value, record.group, mask)
    overall = masked_mean(mean, mask)[:, None]
    weight = torch.where(overall > 0, mean / overall, 1.0)
    early = torch.arange(mask.shape[1], device=mask.device) < first
    relative = group_advantage(value, record.group, eps=eps, mask=mask, unbiased=unbiased)
    return (weight * (relative + anchor * value * early)).where(mask, 0)
