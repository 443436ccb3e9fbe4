"""A critic's value as the baseline: generalised advantages, and what the critic learns."""

import torch
from torch import Tensor

from flowalign.core.record import Record


def generalised(record: Record, gamma: float, smoothing: float) -> Tensor:
    """[B, T] GAE as it is, 0 where nothing was drawn; with the value added to it what a critic learns."""
    assert record.value is not None
    reward, advantage = earned(record), torch.zeros_like(record.value)
    value_after, after = torch.zeros_like(reward[:, 0]), torch.zeros_like(reward[:, 0])
    for t in reversed(range(reward.shape[1])):
        drawn, value = record.mask[:, t], record.value[:, t]
        error = reward[:, t] + gamma * value_after - value
        after = torch.where(drawn, error + gamma * smoothing * after, after)
        value_after = torch.where(drawn, value, value_after)
        advantage[:, t] = after.where(drawn, 0)
    return advantage


def earned(record: Record) -> Tensor:
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
