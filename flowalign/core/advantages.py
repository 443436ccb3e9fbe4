"""Advantages from rewards, which a configuration chooses by name; `groups` has the arithmetic that they share.

A named advantage takes the record of an iteration, and its settings as keywords: -> [B] or [B, T]. None looks at what
an action is, so all serve tokens and denoising steps. What one needs beyond a reward [B], it declares by `declares`.
"""

import math
from collections.abc import Callable
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from flowalign.core.groups import (
    Discount,
    Positive,
    Scale,
    Share,
    against,
    declares,
    first_rows,
    group_advantage,
    group_mean_std,
    members_of,
    returns_of,
)
from flowalign.core.record import Record
from flowalign.core.reshaped import anchored, confident_late, copo, filtered, three_sigma, value_smoothed
from flowalign.core.several_rewards import bnpo, diverse, gdpo, per_reward
from flowalign.core.sharpened import asymmetric, hidden_reward, novel, process_kl
from flowalign.core.token_advantages import gae, gigpo, optimal_token_baseline, process, process_returns, semi_online


@declares(dense=True)
def grpo(
    record: Record,
    *,
    scale: Scale = "group",
    clip: Positive | None = None,
    eps: Positive = 1e-4,
    unbiased: bool = False,
) -> Tensor:
    """GRPO (arXiv 2402.03300): (r - mean_g) / (std_g + eps); scale 'none' is Dr. GRPO's (2503.20783).

    TRL and verl divide by the unbiased standard deviation, image trainers by the population's.
    """
    mask = record.mask if record.reward.dim() == 2 else None
    return group_advantage(record.reward, record.group, scale, clip, eps, mask, unbiased)


@declares(dense=True)
def dr_grpo(record: Record) -> Tensor:
    """Dr. GRPO (arXiv 2503.20783): r - mean_g, without the division that favours very easy and very hard prompts."""
    return grpo(record, scale="none")


def rloo(record: Record) -> Tensor:
    """RLOO (arXiv 2402.14740): r minus the mean of the group's others; 0 in a group of one."""
    reward, others = record.reward, members_of(record.group) - 1
    mean, _ = group_mean_std(reward, record.group)
    return against(others > 0, reward) * (reward - mean) * against((others + 1) / others.clamp(min=1), reward)


def opo(record: Record) -> Tensor:
    """OPO (arXiv 2505.23585): r minus the group's mean reward, each weighed by its number of actions.

    The baseline of least variance, where a row's gradient grows with its length. 0 in a group of one, to which verl
    leaves its reward.
    """
    length = record.mask.sum(1).to(record.reward.dtype)
    weighed, _ = group_mean_std(record.reward * length, record.group)
    mean_length, _ = group_mean_std(length, record.group)
    return record.reward - weighed / mean_length.clamp(min=1e-8)


@declares(dense=True)
def reinforce_pp(
    record: Record, *, baseline: bool = False, gamma: Discount = 1.0, eps: Positive = 1e-8, unbiased: bool = True
) -> Tensor:
    """REINFORCE++ (arXiv 2501.03262): discounted returns, whitened over all actions of the batch. -> [B, T]

    Args:
        baseline: subtract the group's mean reward first, as the paper's variant for groups does.
        gamma: discount; a reward [B] is earned by a row's last action.
        eps: added to the variance.
    """
    mask, reward = record.mask, record.reward
    if baseline:
        reward = grpo(record, scale="none")
    if reward.dim() == 1:
        last = mask.flip(1).to(torch.int8).argmax(1)
        reward = torch.zeros_like(record.log_prob).scatter(1, mask.shape[1] - 1 - last[:, None], reward[:, None])
    returns = returns_of(reward, mask, gamma)
    drawn = returns[mask]
    whitened = (returns - drawn.mean()) * (drawn.var(unbiased=unbiased) + eps).rsqrt()
    return whitened.where(mask, 0)


@declares("baseline", dense=True)
def remax(record: Record) -> Tensor:
    """ReMax (arXiv 2310.10505): r minus the reward of the greedy trajectory of the same prompt."""
    assert record.baseline is not None
    return record.reward - against(record.baseline, record.reward)


def ngrpo(record: Record, *, max_reward: float = 1.0, eps: Positive = 1e-6, unbiased: bool = True) -> Tensor:
    """NGRPO (arXiv 2509.18851): mean and standard deviation with a virtual member of the largest reward.

    A group that is all wrong thus gets negative advantages. To be used with a clip that is narrower below
    (`clip_range` 0.16, `clip_range_high` 0.24 in the paper).
    """
    numbers, first = first_rows(record.group)
    reward = torch.cat([record.reward, record.reward.new_full((len(numbers),), max_reward)])
    group = torch.cat([record.group, record.group[first]])
    return group_advantage(reward, group, eps=eps, unbiased=unbiased)[: len(record.group)]


def pass_k(record: Record, *, k: Annotated[int, Field(ge=1)] = 4) -> Tensor:
    """Pass@k training (arXiv 2508.10751, by its closed form): the advantage when k members are rewarded by their best.

    Rewards are 0 or 1 (above 1/2 counts as 1). In closed form: the mean, over all choices of k members with the row
    among them, of (best - mean) / std of such choices.
    """
    right = record.reward > 0.5
    advantage = torch.zeros_like(record.reward)
    for number in record.group.unique().tolist():
        rows = record.group == number
        members, wrong = int(rows.sum()), int((rows & ~right).sum())
        if members < k:
            raise ValueError(f"pass_k: a group of {members} has no {k} members; k is at most the group size")
        mean = 1 - math.comb(wrong, k) / math.comb(members, k)
        if 0 < mean < 1:
            spread = math.sqrt(mean * (1 - mean))
            advantage[rows & right] = (1 - mean) / spread
            alone = math.comb(wrong - 1, k - 1) / math.comb(members - 1, k - 1) if wrong else 0.0
            advantage[rows & ~right] = (1 - mean - alone) / spread
    return advantage


def max_rl(record: Record) -> Tensor:
    """MaxRL (arXiv 2602.02710): (r - mean_g) / mean_g; 0 where nothing is right. Rewards are 0 or 1.

    The expected gradient is the gradient of log p, p the chance to be right, cut after as many terms of its series as
    a member has others in its group (theorem 5 of its third version): likelihood, learned from samples. The gradient
    of p itself vanishes where p is near 0.
    """
    mean, _ = group_mean_std(record.reward, record.group)
    return ((record.reward - mean) / mean).where(mean > 0, 0)


def best_margin(
    record: Record, *, scale: Literal["group", "none"] = "group", eps: Positive = 1e-6, unbiased: bool = True
) -> Tensor:
    """Only the best of a group learns, by its margin over the second best (arXiv 2503.19595; verl's grpo_passk)."""
    advantage = torch.zeros_like(record.reward)
    for number in record.group.unique().tolist():
        rows = (record.group == number).nonzero()[:, 0]
        if len(rows) > 1:
            best, which = record.reward[rows].topk(2)
            spread = record.reward[rows].std(unbiased=unbiased) + eps if scale == "group" else 1.0
            advantage[rows[which[0]]] = (best[0] - best[1]) / spread
    return advantage


def psr_nsr(record: Record, *, positive: Share = 0.1, negative: Share = 1.0) -> Tensor:
    """PSR, NSR and weighted REINFORCE (arXiv 2506.01347): +positive where right, -negative where wrong.

    positive 1 and negative 0 is PSR, 0 and 1 NSR, the defaults W-REINFORCE. Rewards are 0 or 1 (above 1/2 is right).
    """
    return torch.where(record.reward > 0.5, positive, -negative).to(record.reward.dtype)


def gpg(record: Record, *, divisor: Positive = 1.0) -> Tensor:
    """GPG (arXiv 2504.02546): alpha (r - mean_g) / divisor, alpha = B / (B - M), so that rows that teach nothing cost
    nothing.

    M counts the rows of groups whose rewards are all alike. verl counts the rows of reward 0 instead, right or wrong.

    Args:
        divisor: F_norm, the same for all; published: 1.
    """
    mean, std = group_mean_std(record.reward, record.group)
    teaching = (std > 0).sum().clamp(min=1)
    return len(std) / teaching * (record.reward - mean) / divisor


ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opo": opo,
    "reinforce_pp": reinforce_pp,
    "remax": remax,
    "per_reward": per_reward,
    "diverse": diverse,
    "gdpo": gdpo,
    "bnpo": bnpo,
    "ngrpo": ngrpo,
    "gigpo": gigpo,
    "process": process,
    "process_returns": process_returns,
    "pass_k": pass_k,
    "max_rl": max_rl,
    "best_margin": best_margin,
    "psr_nsr": psr_nsr,
    "gpg": gpg,
    "optimal_token_baseline": optimal_token_baseline,
    "gae": gae,
    "filtered": filtered,
    "three_sigma": three_sigma,
    "value_smoothed": value_smoothed,
    "confident_late": confident_late,
    "copo": copo,
    "anchored": anchored,
    "asymmetric": asymmetric,
    "novel": novel,
    "process_kl": process_kl,
    "hidden_reward": hidden_reward,
    "semi_online": semi_online,
}
