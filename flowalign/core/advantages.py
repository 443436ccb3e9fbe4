"""Advantages from rewards: pure functions on [B] or [B, T] arrays with a group number for each trajectory."""

from typing import Literal

import torch
from torch import Tensor

Scale = Literal["group", "batch", "none"]


def group_mean_std(values: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population standard deviation of each row's group, spread back to the rows.

    Args:
        values: [B] or [B, T].
        group: [B] integers; rows with the same number belong together.

    Returns:
        Two tensors shaped like values; the columns of [B, T] are kept apart.
    """
    _, index = group.unique(return_inverse=True)
    count = index.bincount().to(values.dtype)
    count = count.view(-1, *[1] * (values.dim() - 1))

    def mean(x: Tensor) -> Tensor:
        return (torch.zeros_like(count.expand(-1, *x.shape[1:])).index_add(0, index, x) / count)[index]

    centre = mean(values)
    return centre, mean((values - centre) ** 2).sqrt()


def group_advantage(
    reward: Tensor, group: Tensor, scale: Scale = "group", clip: float | None = None, eps: float = 1e-4
) -> Tensor:
    """Group-relative advantage A = (r - mean_g) / (std + eps) (GRPO, arXiv 2402.03300; Flow-GRPO, 2505.05470).

    Args:
        reward: [B], or [B, T] to normalise each action index on its own.
        group: [B] integers.
        scale: divide by the standard deviation of the 'group', of the whole 'batch', or by 'none'
            (Dr. GRPO, arXiv 2503.20783).
        clip: bound on |A|.

    Returns:
        Advantages shaped like reward.
    """
    mean, std = group_mean_std(reward, group)
    advantage = reward - mean
    if scale == "batch":
        std = reward.std(0, correction=0, keepdim=True)
    if scale != "none":
        advantage = advantage / (std + eps)
    return advantage if clip is None else advantage.clamp(-clip, clip)


def zero_spread(reward: Tensor, group: Tensor) -> Tensor:
    """Share of trajectories whose group got one and the same reward, so that they teach nothing: a scalar."""
    _, std = group_mean_std(reward, group)
    return (std.reshape(len(std), -1).amax(1) < 1e-6).float().mean()
