"""Advantages with another baseline than the group's mean: of least variance, or a critic's value."""

import torch
from torch import Tensor

from flowalign.core.groups import Discount, Positive, declares, group_mean_std, returns_of
from flowalign.core.record import Record


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
    returns = returns_of(_earned(record), mask, 1.0)
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


def generalised(record: Record, gamma: float, smoothing: float) -> Tensor:
    """[B, T] GAE as it is, 0 where nothing was drawn; with the value added to it what a critic learns."""
    assert record.value is not None
    reward, advantage = _earned(record), torch.zeros_like(record.value)
    value_after, after = torch.zeros_like(reward[:, 0]), torch.zeros_like(reward[:, 0])
    for t in reversed(range(reward.shape[1])):
        drawn, value = record.mask[:, t], record.value[:, t]
        error = reward[:, t] + gamma * value_after - value
        after = torch.where(drawn, error + gamma * smoothing * after, after)
        value_after = torch.where(drawn, value, value_after)
        advantage[:, t] = after.where(drawn, 0)
    return advantage


def _earned(record: Record) -> Tensor:
    """[B, T] what each action earned: its steps, its own reward, or at a row's last action the row's."""
    if record.steps is not None:
        return record.steps.nan_to_num()
    if record.reward.dim() == 2:
        return record.reward
    last = record.mask.shape[1] - 1 - record.mask.flip(1).to(torch.int8).argmax(1, keepdim=True)
    return torch.zeros_like(record.log_prob).scatter(1, last, record.reward[:, None].to(record.log_prob.dtype))


def clipped_value_loss(value: Tensor, old_value: Tensor, returns: Tensor, clip_range: float) -> Tensor:
    """PPO's loss of a critic: half the larger squared error of its value and of that within clip_range of the old one.

    As in TRL and verl; all of one shape.
    """
    near = old_value + (value - old_value).clamp(-clip_range, clip_range)
    return 0.5 * torch.maximum((value - returns) ** 2, (near - returns) ** 2)
