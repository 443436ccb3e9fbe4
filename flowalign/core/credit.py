"""Credit: which step of a trajectory earned what. Pure functions from rewards to rewards or advantages of steps.

`values` [B, T + 1] are the rewards of a trajectory's completions: values[:, k] scores the deterministic finish of
the state after k steps, so that column 0 is the finish of the start noise and column T the sample itself. They may
as well be of some consecutive steps, a window's for instance, with T the number of steps in it.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from flowalign.core.groups import group_mean_std

TurningPointVariant = Literal["aggregate", "total", "released"]


def dense_rewards(values: Tensor) -> Tensor:
    """Gain of each step, d_k = R_k - R_{k-1}: [B, T + 1] -> [B, T] (DenseGRPO, arXiv 2601.20218, eq. 7).

    They telescope: a row's sum is R_T - R_0.
    """
    return values.diff(dim=1)


def lasting_gains(values: Tensor, group: Tensor) -> Tensor:
    """Gain of each step over what lasts of the value before it: R_k - c_k R_{k-1}, [B, T + 1] -> [B, T].

    c_k is the slope of R_k on R_{k-1} within groups, the control variate of least variance. DenseGRPO's 1 adds noise
    where the slope is below 1/2. A state that a group shares has no slope and needs none: advantages take the group's
    mean off, and its value with it.

    Args:
        group: [B] integers.
    """
    centred = values - group_mean_std(values, group)[0]
    before, after = centred[:, :-1], centred[:, 1:]
    square = before.square().sum(0)
    # rounding leaves equal values of a group a little apart, and a slope on that would be noise
    slope = ((before * after).sum(0) / square).where(square > 1e-8 * len(values), 0)
    return values[:, 1:] - slope * values[:, :-1]


def turning_points(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """The steps that turn a trajectory towards its overall trend: [B, T + 1] -> bool [B, T] (TP-GRPO, 2602.06422).

    With D = R_T - R_0 and s_k = sign(d_k) sign(D), step k > 1 is one where s_{k-1} < 0 < s_k, and step 1 where
    s_1 > 0. A step without a gain is neither for nor against; without an overall gain there are none.

    Args:
        mask: [B, T] bool, the stochastic steps: only they are numbered by k. Default: all.
    """
    trend = dense_rewards(values).sign() * (values[:, -1:] - values[:, :1]).sign()
    turns, before = torch.zeros_like(trend, dtype=torch.bool), -torch.ones_like(trend[:, 0])
    for k in range(trend.shape[1]):
        turns[:, k] = (before < 0) & (trend[:, k] > 0)
        before = trend[:, k] if mask is None else trend[:, k].where(mask[:, k], before)
    return turns


def turning_point_rewards(
    values: Tensor, variant: TurningPointVariant = "aggregate", mask: Tensor | None = None
) -> Tensor:
    """Step rewards of TP-GRPO (arXiv 2602.06422): [B, T + 1] -> [B, T].

    Args:
        values: [B, T + 1]; the start noise of column 0 must be the trajectory's own (the released code draws
            another).
        variant: credit of a turning point k, and of the other steps:
            'aggregate', the abstract: R_T - R_{k-1}, its long-term effect; others d_k.
            'released', the authors' launch scripts: as 'aggregate', but only where d_k and R_T - R_k have one sign,
            and, of the turning points of all rows, as many of rising as of falling trajectories, those with the
            largest |D| (all, if one kind is missing).
            'total', the authors' configuration file, which no launch script leaves as it is: D + d_k; others D.
        mask: [B, T] bool, the stochastic steps, as in `turning_points`.
    """
    gains, turns = dense_rewards(values), turning_points(values, mask)
    total = values[:, -1:] - values[:, :1]
    if variant == "total":
        return total + gains.where(turns, 0)
    if variant == "released":
        turns = turns & (gains.sign() * (values[:, -1:] - values[:, 1:]).sign() > 0)
        turns = _balanced(turns, total)
    return (values[:, -1:] - values[:, :-1]).where(turns, gains)


def _balanced(turns: Tensor, total: Tensor) -> Tensor:
    """Equally many turning points of each sign of total [B, 1], the largest |total| first; turns [B, T]."""
    rising, falling = turns & (total > 0), turns & (total < 0)
    count = torch.minimum(rising.sum(), falling.sum())
    size = total.abs().expand(turns.shape)

    def largest(candidates: Tensor) -> Tensor:
        order = size.where(candidates, -1).flatten().argsort(descending=True, stable=True)
        return candidates & (order.argsort().view(turns.shape) < count)

    return torch.where(count > 0, largest(rising) | largest(falling), turns)


def hierarchical(scores: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Weighted sum of the scores of a picture's levels: global, subject, relation (HiCoGen, arXiv 2511.19965).

    The authors published no weights. Where a level does not apply to a sample (a prompt without a relation) its
    score is NaN, and the others stand in for it in proportion to their weights, so that the scale is kept.

    Args:
        scores: level to [B]; a sample has at least one level that applies.
        weights: level to its weight, positive; levels without one do not count.

    Returns:
        [B].
    """
    values = torch.stack([scores[level] for level in weights])
    weight = torch.tensor(list(weights.values()), dtype=values.dtype, device=values.device)[:, None]
    present = ~values.isnan()
    return (values.nan_to_num() * weight).sum(0) * weight.sum() / (weight * present).sum(0)


def best_and_worst(advantage: Tensor, group: Tensor, k: int) -> Tensor:
    """The k members of each group that teach most: the better half best, the other half worst (DanceGRPO, 2505.07818).

    Args:
        advantage: [B], of the whole group: it is not normalised again.
        group: [B] integers.
        k: at most the group's size; an odd one takes one more of the best. Ties go by row.

    Returns:
        [B] bool, k True a group.
    """
    same = _same_group(group)
    row = torch.arange(len(group), device=group.device)
    tie = (advantage[:, None] == advantage) & (row < row[:, None])
    above = (same & ((advantage > advantage[:, None]) | tie)).sum(1)
    return (above < (k + 1) // 2) | (above >= same.sum(1) - k // 2)


def most_varied(reward: Tensor, group: Tensor, k: int) -> Tensor:
    """The k members of each group whose rewards vary most (optimal variance filtering, Pro-GRPO, arXiv 2512.15347).

    Of all choices of k numbers the one of the largest variance has some of the lowest and some of the highest.

    Args:
        reward: [B]
        group: [B] integers, at least k of each.

    Returns:
        [B] bool, k True a group. Of choices that vary alike it is the one with the most of the lowest; ties go by row.
    """
    chosen = torch.zeros_like(group, dtype=torch.bool)
    for number in group.unique():
        rows = (group == number).nonzero().squeeze(1)
        order = rows[reward[rows].argsort(stable=True)]
        ends = [torch.cat([order[:low], order[len(order) - k + low :]]) for low in range(k, -1, -1)]
        spread = torch.stack([reward[end].double().var(correction=0) for end in ends])
        chosen[ends[int(spread.argmax())]] = True
    return chosen


def preferred(reward: Tensor, threshold: Tensor | float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """The best and the worst member of each group, and whether they are far enough apart to be a pair.

    The gap is of the two rewards' softmax, P(best) - P(worst) = tanh((best - worst) / 2), as in SPO's code (arXiv
    2406.04314); it must exceed the threshold, so that ties are no pairs.

    Args:
        reward: [G, M, T] of M members of G groups at T steps.
        threshold: in [0, 1), or [T] of them.

    Returns:
        [G, T] members twice, best and worst, and [G, T] bool.
    """
    (high, best), (low, worst) = reward.max(1), reward.min(1)
    return best, worst, torch.tanh((high - low) / 2) > threshold


def _same_group(group: Tensor) -> Tensor:
    return group[:, None] == group


def back_up(reward: Tensor, nodes: Tensor) -> Tensor:
    """Rewards of a tree's leaves to all its nodes, each the mean of the leaves under it (BranchGRPO, 2509.06040).

    Args:
        reward: [B] of the leaves.
        nodes: [B, T + 1] integers, the node each leaf's path is at; within a depth (a column) no two trees share one.
            `samplers.Tree.nodes` gives one tree's.

    Returns:
        [B, T + 1]; column k + 1 is what the step k of a path led to.
    """
    _, index = _numbered(nodes).unique(return_inverse=True)
    reward = reward[:, None].expand(nodes.shape).flatten()
    count = index.flatten().bincount()
    return (reward.new_zeros(len(count)).index_add(0, index.flatten(), reward) / count)[index]


def first_of(nodes: Tensor) -> Tensor:
    """One row for every node: [B, T] integers -> [B, T] bool, so that a step shared by leaves is trained on once."""
    _, index = _numbered(nodes).unique(return_inverse=True)
    row = torch.arange(len(nodes), device=nodes.device)[:, None].expand(nodes.shape)
    first = torch.full_like(nodes.flatten(), len(nodes)).scatter_reduce(0, index.flatten(), row.flatten(), "amin")
    return first[index] == row


def _numbered(nodes: Tensor) -> Tensor:
    """Numbers that differ between the columns too."""
    return nodes + (nodes.max() + 1) * torch.arange(nodes.shape[1], device=nodes.device)
