"""Advantages of each action by itself: of turns and steps, against a baseline for each token, by a critic."""

import torch
from torch import Tensor

from flowalign.core.baselines import earned, generalised
from flowalign.core.groups import (
    Discount,
    Positive,
    Scale,
    Share,
    declares,
    group_advantage,
    group_mean_std,
    returns_of,
)
from flowalign.core.record import Record, by_turn


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


def _step_rewards(record: Record) -> tuple[Tensor, Tensor]:
    """[B, T] rewards, and bool where a step that has one ends; a reward [B] is a step at a row's last action."""
    if record.steps is not None:
        return record.steps.nan_to_num(), record.mask & ~record.steps.isnan()
    if record.reward.dim() == 2:
        return record.reward, record.mask
    last = record.mask.shape[1] - 1 - record.mask.flip(1).to(torch.int8).argmax(1, keepdim=True)
    ends = torch.zeros_like(record.mask).scatter(1, last, True)
    return record.reward[:, None].expand_as(record.log_prob), ends


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


@declares(dense=True)
def semi_online(
    record: Record,
    *,
    weight: Share = 1.0,
    gamma: Discount = 0.5,
    matched: float = 0.5,
    scale: Scale = "none",
    eps: Positive = 1e-6,
    unbiased: bool = True,
) -> Tensor:
    """UI-S1's advantage (arXiv 2509.11543, and the authors' code): A_episode + weight * A_turn. -> [B, T]

    A_turn compares the discounted returns of a group's turns of one number; a turn that earned less than `matched`,
    which left its trace, has its own reward alone, and nothing after it pays for what came before. A_episode compares
    the episodes' rewards, where an episode counts once a turn. The environment `trace` walks offline traces.

    Args:
        record: rewards are `steps`, a reward [B, T], or one [B] that a row's last turn earns.
        scale: of both parts; the authors' 'mean_norm' divides by nothing.
    """
    turns = by_turn(record.turn, record.mask)
    taken = turns.sum(torch.ones_like(record.log_prob)) > 0
    each = turns.sum(earned(record))
    returns, later = torch.zeros_like(each), torch.zeros_like(each[:, 0])
    for k in reversed(range(each.shape[1])):
        good = taken[:, k] & (each[:, k] >= matched)
        later = torch.where(good, each[:, k] + gamma * later, 0)
        returns[:, k] = torch.where(good, later, each[:, k])
    _, number = record.group.unique(return_inverse=True)
    group = number[:, None].expand_as(taken)[taken]
    count = torch.arange(taken.shape[1], device=taken.device).expand_as(taken)[taken]
    advantage = torch.zeros_like(returns)
    episode = each.sum(1, keepdim=True).expand_as(taken)[taken]
    of_turn = group_advantage(returns[taken], group * taken.shape[1] + count, scale, eps=eps, unbiased=unbiased)
    advantage[taken] = group_advantage(episode, group, scale, eps=eps, unbiased=unbiased) + weight * of_turn
    return turns.spread(advantage).where(record.mask, 0)
