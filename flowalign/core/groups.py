"""Groups and returns: the arithmetic that advantages share, and how one declares what it needs."""

from collections.abc import Callable
from typing import Annotated, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor

Scale = Literal["group", "batch", "none"]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0)]
Discount = Annotated[float, Field(ge=0, le=1)]


def group_mean_std(
    values: Tensor, group: Tensor, mask: Tensor | None = None, unbiased: bool = False
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each row's group, spread back to the rows.

    Computed in float64: there the mean of equal values is that value, and their standard deviation 0.

    Args:
        values: [B] or [B, T].
        group: [B] integers; rows with the same number belong together.
        mask: bool, shaped like values; what is False does not enter. Default: all that is no NaN enters.
        unbiased: divide the squares by one less than their number; 0 for a group of one.

    Returns:
        Two tensors shaped like values; the columns of [B, T] are kept apart.
    """
    if values.device.type == "mps":
        # which has no float64
        on_cpu = group_mean_std(values.cpu(), group.cpu(), None if mask is None else mask.cpu(), unbiased)
        return on_cpu[0].to(values.device), on_cpu[1].to(values.device)
    dtype, values = values.dtype, values.double()
    numbers, index = group.unique(return_inverse=True)
    mask = ~values.isnan() if mask is None else mask

    def total(x: Tensor) -> Tensor:
        return x.new_zeros(len(numbers), *x.shape[1:]).index_add(0, index, x.where(mask, 0))[index]

    count = total(torch.ones_like(values)).clamp(min=1)
    centre = total(values) / count
    std = (total((values - centre) ** 2) / (count - int(unbiased)).clamp(min=1)).sqrt()
    return centre.to(dtype), std.to(dtype)


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
    return (std.reshape(len(std), -1).amax(1) == 0).float().mean()


F = TypeVar("F", bound=Callable[..., Tensor])


def declares(*needs: str, dense: bool = False, centres_steps: bool = False) -> Callable[[F], F]:
    """Decorator: what an advantage needs; without it, a reward [B] alone.

    Args:
        needs: fields of the record that not every rollout has, such as rewards, baseline, state or value.
        dense: it also takes a reward [B, T], one of every action, of which the mask says which were drawn.
        centres_steps: it takes a mean off each step's reward, which undoes a bound on the sum of them.
    """

    def declare(advantage: F) -> F:
        vars(advantage).update(needs=frozenset(needs), dense=dense, centres_steps=centres_steps)
        return advantage

    return declare


def returns_of(reward: Tensor, ends: Tensor, gamma: float) -> Tensor:
    """[B, T] from each action on, the discounted sum of the rewards [B, T] where `ends` is True."""
    returns, later = torch.zeros_like(reward), torch.zeros_like(reward[:, 0])
    for t in reversed(range(reward.shape[1])):
        later = torch.where(ends[:, t], reward[:, t] + gamma * later, later)
        returns[:, t] = later
    return returns


def against(values: Tensor, like: Tensor) -> Tensor:
    """[B] values against [B] or [B, T]."""
    return values.view(-1, *[1] * (like.dim() - 1))


def members_of(group: Tensor) -> Tensor:
    """[B] members of each row's group."""
    _, index, count = group.unique(return_inverse=True, return_counts=True)
    return count[index]


def first_rows(group: Tensor) -> tuple[Tensor, Tensor]:
    """The groups' numbers and the first row of each."""
    numbers, index = group.unique(return_inverse=True)
    rows = torch.arange(len(group), device=group.device)
    return numbers, torch.full_like(numbers, len(group)).scatter_reduce(0, index, rows, "amin")
