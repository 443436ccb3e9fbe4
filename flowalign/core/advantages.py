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

from flowalign.core.baselines import earned, generalised
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
from flowalign.core.record import Record, by_turn
from flowalign.core.reshaped import anchored, confident_late, copo, filtered, three_sigma


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


def ngrpo(record: Record, *, max_reward: float = 1.0, eps: Positive = 1e-6, unbiased: bool = True) -> Tensor:
    """NGRPO (arXiv 2509.18851): mean and standard deviation with a virtual member of the largest reward.

    A group that is all wrong thus gets negative advantages. To be used with a clip that is narrower below
    (`clip_range` 0.16, `clip_range_high` 0.24 in the paper).
    """
    numbers, first = first_rows(record.group)
    reward = torch.cat([record.reward, record.reward.new_full((len(numbers),), max_reward)])
    group = torch.cat([record.group, record.group[first]])
    return group_advantage(reward, group, eps=eps, unbiased=unbiased)[: len(record.group)]


@declares("state", dense=True)
def gigpo(
    record: Record,
    *,
    weight: Share = 1.0,
    gamma: Discount = 0.95,
    scale: Scale = "group",
    eps: Positive = 1e-6,
    unbiased: bool = True,
) -> Tensor:
    """GiGPO (arXiv 2505.10978, eq. 3 to 8, and the authors' code): A = A_episode + weight * A_step. -> [B, T]

    A_step compares the discounted returns of turns that members of a group took in one and the same state; all actions
    of a turn get the turn's. Without turns every action is one. The authors' choice of similar states in the place of
    equal ones is left out.

    Args:
        record: with `state`, alike on the actions of a turn. Rewards are `steps`, a reward [B, T], or one [B] that is
            earned by a row's last turn.
        gamma: discount of the returns, from turn to turn.
        scale: scale of both parts; the authors' default divides by nothing where variance is noisy ('none').
    """
    assert record.state is not None
    mask, reward = record.mask, record.reward
    turns = by_turn(record.turn, mask)
    taken = turns.sum(torch.ones_like(record.log_prob)) > 0
    if record.steps is not None:
        earned = turns.sum(record.steps.nan_to_num())
    elif reward.dim() == 2:
        earned = turns.sum(reward)
    else:
        number = torch.arange(taken.shape[1], device=mask.device)
        earned = reward[:, None] * (number == turns.turn.amax(1, keepdim=True))
    episode = group_advantage(earned.sum(1), record.group, scale, eps=eps, unbiased=unbiased)
    returns = returns_of(earned, taken, gamma)
    # the group and the state within it, as one number
    _, group_number = record.group.unique(return_inverse=True)
    state = group_number[:, None] * (record.state.max() + 1) + record.state
    states = torch.zeros_like(taken, dtype=torch.long).scatter_reduce(1, turns.turn, state.where(mask, 0), "amax")
    steps = torch.zeros_like(returns)
    steps[taken] = group_advantage(returns[taken], states[taken], scale, eps=eps, unbiased=unbiased)
    return (episode[:, None] + weight * turns.spread(steps)).where(mask, 0)


@declares(dense=True, centres_steps=True)
def process(
    record: Record,
    *,
    gamma: Discount = 1.0,
    scale: Scale = "group",
    eps: Positive = 1e-4,
    unbiased: bool = True,
) -> Tensor:
    """GRPO with process supervision (arXiv 2402.03300, section 4.1.3): the sum of all later steps' rewards. -> [B, T]

    The rewards of a group's steps are normalised together; with gamma 0 a step has its own alone, as in
    Stepwise-Flow-GRPO (2603.28718). With a discount from step to step it is IGPO's advantage
    (2510.14967, eq. 5 to 7); the code its authors published adds up the rewards first and takes off the group's mean at
    the same token, without a division. Each step's reward is centred, so that steps of an average reward cost nothing:
    rewards with a bound on their sum need `process_returns`.

    Args:
        record: with `steps`, or a reward [B, T] of every action; a reward [B] alone is a step at a row's last action.
    """
    reward, ends = _step_rewards(record)
    group = record.group[:, None].expand_as(ends)
    earned = torch.zeros_like(record.log_prob)
    earned[ends] = group_advantage(reward[ends], group[ends], scale, eps=eps, unbiased=unbiased)
    return returns_of(earned, ends, gamma).where(record.mask, 0)


@declares(dense=True)
def process_returns(
    record: Record,
    *,
    gamma: Discount = 1.0,
    scale: Scale = "group",
    eps: Positive = 1e-4,
    unbiased: bool = True,
) -> Tensor:
    """`process` the other way round: later steps' rewards are added up, then a group's sums normalised. -> [B, T]

    One rising function for a whole group leads from a sum to its advantage, so that what does not raise the sum of
    rewards, as further steps do not under `clip_bound` and `delta_bound` (arXiv 2410.15115), does not pay.
    """
    reward, ends = _step_rewards(record)
    mask, group = record.mask, record.group[:, None].expand_as(ends)
    returns = returns_of(reward, ends, gamma)
    advantage = torch.zeros_like(returns)
    advantage[mask] = group_advantage(returns[mask], group[mask], scale, eps=eps, unbiased=unbiased)
    return advantage


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


def _step_rewards(record: Record) -> tuple[Tensor, Tensor]:
    """[B, T] rewards, and bool where a step that has one ends; a reward [B] is a step at a row's last action."""
    if record.steps is not None:
        return record.steps.nan_to_num(), record.mask & ~record.steps.isnan()
    if record.reward.dim() == 2:
        return record.reward, record.mask
    last = record.mask.shape[1] - 1 - record.mask.flip(1).to(torch.int8).argmax(1, keepdim=True)
    ends = torch.zeros_like(record.mask).scatter(1, last, True)
    return record.reward[:, None].expand_as(record.log_prob), ends


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


@declares("collision", dense=True)
def optimal_token_baseline(record: Record) -> Tensor:
    """The baseline of least variance for each action (arXiv 2602.07078; verl's name, too). -> [B, T]

    A_t = G_t - sum_g(G_t W_t) / sum_g(W_t), with the return G_t from an action on, and W_t the sum up to it of
    1 - 2 pi + sum pi^2, the squared gradient of its log-probability by the logits. Actions of a group are compared by
    their number. Where only one of the group is left, and in a group of one, it is 0, as in verl.

    Args:
        record: with `collision`.
    """
    assert record.collision is not None
    mask = record.mask
    energy = (1 - 2 * record.log_prob.exp() + record.collision).where(mask, 0).cumsum(1).where(mask, 0)
    returns = returns_of(earned(record), mask, 1.0)
    weighed, _ = group_mean_std(returns * energy, record.group)
    weight, _ = group_mean_std(energy, record.group)
    # means are sums over the members, whose number cancels
    left, _ = group_mean_std(mask.float(), record.group)
    same = (record.group[:, None] == record.group).sum(1, keepdim=True)
    several = (left * same).round() > 1
    baseline = (weighed / weight.clamp(min=1e-8)).where(several, 0)
    return (returns - baseline).where(mask, 0)


@declares("value", dense=True)
def gae(record: Record, *, gamma: Discount = 1.0, smoothing: Discount = 0.95) -> Tensor:
    """Generalised advantages (arXiv 1506.02438), whitened over all actions of the batch, as in verl. -> [B, T]

    Args:
        record: with `value`. Rewards are `steps`, a reward [B, T], or one [B] that a row's last action earns.
        gamma: discount of returns; `smoothing`, the lambda of GAE, of errors: 1 is the return less the value.
    """
    mask = record.mask
    advantage = generalised(record, gamma, smoothing)
    drawn = advantage[mask]
    return ((advantage - drawn.mean()) * (drawn.var() + 1e-8).rsqrt()).where(mask, 0)


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
    "confident_late": confident_late,
    "copo": copo,
    "anchored": anchored,
}
