"""Advantages from rewards: pure functions on [B] or [B, T] arrays with a group number for each trajectory."""

from typing import Literal

import torch
from torch import Tensor

Scale = Literal["group", "batch", "none"]


def group_mean_std(
    values: Tensor, group: Tensor, mask: Tensor | None = None, unbiased: bool = False
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each row's group, spread back to the rows.

    Args:
        values: [B] or [B, T].
        group: [B] integers; rows with the same number belong together.
        mask: bool, shaped like values; what is False does not enter. Default: everything enters.
        unbiased: divide the squares by one less than their number; 0 for a group of one.

    Returns:
        Two tensors shaped like values; the columns of [B, T] are kept apart.
    """
    numbers, index = group.unique(return_inverse=True)
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask

    def total(x: Tensor) -> Tensor:
        return x.new_zeros(len(numbers), *x.shape[1:]).index_add(0, index, x.where(mask, 0))[index]

    count = total(torch.ones_like(values)).clamp(min=1)
    centre = total(values) / count
    return centre, (total((values - centre) ** 2) / (count - int(unbiased)).clamp(min=1)).sqrt()


def group_advantage(
    reward: Tensor,
    group: Tensor,
    scale: Scale = "group",
    clip: float | None = None,
    eps: float = 1e-4,
    mask: Tensor | None = None,
    unbiased: bool = False,
) -> Tensor:
    """Group-relative advantage A = (r - mean_g) / (std + eps) (GRPO, arXiv 2402.03300; Flow-GRPO, 2505.05470).

    Args:
        reward: [B], or [B, T] to normalise each action index on its own.
        group: [B] integers.
        scale: divide by the standard deviation of the 'group', of the whole 'batch', or by 'none'
            (Dr. GRPO, arXiv 2503.20783).
        clip: bound on |A|.
        mask: bool, shaped like reward: the actions that were drawn. The others enter no mean and no standard
            deviation, and their advantage is 0.
        unbiased: use the unbiased standard deviation, as TRL and verl do.

    Returns:
        Advantages shaped like reward.
    """
    mean, std = group_mean_std(reward, group, mask, unbiased)
    advantage = reward - mean
    if scale == "batch":
        _, std = group_mean_std(reward, torch.zeros_like(group), mask, unbiased)
    if scale != "none":
        advantage = advantage / (std + eps)
    if mask is not None:
        advantage = advantage.where(mask, 0)
    return advantage if clip is None else advantage.clamp(-clip, clip)


def zero_spread(reward: Tensor, group: Tensor, mask: Tensor | None = None) -> Tensor:
    """Share of trajectories whose group got one and the same reward, so that they teach nothing: a scalar."""
    _, std = group_mean_std(reward, group, mask)
    return (std.reshape(len(std), -1).amax(1) < 1e-6).float().mean()
