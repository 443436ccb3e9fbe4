"""Policy losses, one value an action: the arithmetic, then the losses that a configuration chooses by name.

A named loss takes `Actions`, and its settings as keywords: -> the losses, and values of the same shape for the
metrics, by their names. Most look at one action at a time, so that they serve denoising steps too, whose losses are
computed in any order; the others say so by `declares`.
"""

import math
from collections.abc import Callable
from typing import Annotated, Literal, TypeVar, get_args

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from flowalign.core.aggregation import Aggregation
from flowalign.core.groups import group_mean_std
from flowalign.core.record import LARGEST_LOG_RATIO, Actions, masked_mean, masked_sum, ratio_of

Positive = Annotated[float, Field(gt=0)]
Losses = tuple[Tensor, dict[str, Tensor]]


def clipped_policy_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    clip_low: float,
    clip_high: float,
    dual: float | None = None,
) -> Tensor:
    """PPO's clipped surrogate -min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(log_prob - old_log_prob).

    arXiv 1707.06347, eq. 7. For denoising steps log_prob is a mean over elements, hence published clip ranges
    of 1e-5 to 1e-3 (Flow-GRPO, arXiv 2505.05470).

    Args:
        dual: > 1, bound -dual * A on the loss of negative advantages, whose ratio the plain clip leaves without
            one (dual-clip PPO, arXiv 1912.09729, eq. 5).
    """
    ratio = ratio_of(log_prob, old_log_prob)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-advantage * ratio, -advantage * clipped)
    if dual is None:
        return loss
    return torch.where(advantage < 0, torch.minimum(loss, -dual * advantage), loss)


def clip_fraction(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    clip_low: float,
    clip_high: float,
    dual: float | None = None,
) -> Tensor:
    """1 where the clip takes the gradient away, 0 elsewhere."""
    ratio = ratio_of(log_prob, old_log_prob)
    high = (advantage > 0) & (ratio > 1 + clip_high)
    low = (advantage < 0) & (ratio < 1 - clip_low)
    clipped = high | low
    if dual is not None:
        clipped = clipped | ((advantage < 0) & (ratio > dual))
    return clipped.float()


LooksAt = Literal["action", "row", "group"]
LOOKS_AT: tuple[LooksAt, ...] = get_args(LooksAt)
N = TypeVar("N", bound=Callable[..., Losses])


def declares(looks_at: LooksAt, ratio_of_rows: bool = False, aggregation: Aggregation = "sequence") -> Callable[[N], N]:
    """Decorator: what a loss looks at in one piece; without it, one action.

    Args:
        looks_at: 'row', all actions of a row; 'group', all rows of a group too.
        ratio_of_rows: its ratio is the geometric mean of a row's, which then corrects the KL's gradient too, as in TRL.
        aggregation: its published one, where no other is set; of a loss that is one number a row the mean over rows.
    """

    def declare(loss: N) -> N:
        vars(loss).update(looks_at=looks_at, aggregation=aggregation, ratio_of_rows=ratio_of_rows)
        return loss

    return declare


def ppo(
    actions: Actions,
    *,
    clip_range: Positive | None = 0.2,
    clip_range_high: Positive | None = None,
    dual_clip: Annotated[float, Field(gt=1)] | None = None,
    largest_ratio: Annotated[float, Field(gt=1)] | None = None,
) -> Losses:
    """PPO's clip (arXiv 1707.06347), with DAPO's clip-higher (2503.14476) and the dual clip (1912.09729).

    Args:
        clip_range: None: no clip.
        clip_range_high: upper clip; default clip_range.
        dual_clip: bound on the ratio of actions with a negative advantage.
        largest_ratio: ratios stay between 1 / largest_ratio and this, without a gradient beyond (StableReinforce's
            pre-clip, arXiv 2505.02835: 1000); default exp(20), as everywhere.
    """
    low = math.inf if clip_range is None else clip_range
    log_prob = actions.log_prob
    if largest_ratio is not None:
        limit = math.log(largest_ratio)
        log_prob = actions.old_log_prob + (log_prob - actions.old_log_prob).clamp(-limit, limit)
    inputs = log_prob, actions.old_log_prob, actions.advantage, low, clip_range_high or low, dual_clip
    return clipped_policy_loss(*inputs), {"policy/clip_fraction": clip_fraction(*inputs)}


def reinforce(actions: Actions) -> Losses:
    """REINFORCE: -A log pi. On the weights that sampled it has the gradient of every loss with a ratio."""
    return -actions.advantage * actions.log_prob, {}


def dro(actions: Actions, *, beta: Positive = 0.05) -> Losses:
    """DRO (arXiv 2405.19107): -A log pi + beta / 2 (log pi - log pi_old)^2: held by a square in the place of a clip.

    In the form of its gradient for one action, as in Tinker's loss of this name; the paper's is of whole texts, with a
    learned value in the place of the group's mean. On the weights that sampled it has every other loss's gradient.
    """
    log_ratio = (actions.log_prob - actions.old_log_prob).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return -actions.advantage * actions.log_prob + beta / 2 * log_ratio**2, {}


@declares("row", ratio_of_rows=True)
def gspo(actions: Actions, *, clip_range: Positive = 3e-4, clip_range_high: Positive | None = 4e-4) -> Losses:
    """GSPO (arXiv 2507.18071): PPO's clip with the geometric mean of a row's ratios in the place of each one.

    In the token form of the paper's section 4.3: every action's gradient is scaled by the row's ratio, and the loss
    is to be averaged over a row first (aggregation 'sequence').
    """
    row = masked_mean(actions.log_prob - actions.old_log_prob, actions.mask).detach()[:, None]
    log_ratio = row + actions.log_prob - actions.log_prob.detach()
    inputs = log_ratio, torch.zeros_like(log_ratio), actions.advantage, clip_range, clip_range_high or clip_range
    return clipped_policy_loss(*inputs), {"policy/clip_fraction": clip_fraction(*inputs)}


def cispo(actions: Actions, *, clip_range: Positive | None = None, clip_range_high: Positive = 4.0) -> Losses:
    """CISPO (arXiv 2506.13585): -sg(clip(r)) A log pi: the weight is clipped, never the gradient of an action.

    Args:
        clip_range: the weight's lower bound is 1 - clip_range; None: none, as published.
    """
    ratio = actions.ratio.detach()
    ratio = ratio.clamp(None if clip_range is None else 1 - clip_range, 1 + clip_range_high)
    return -ratio * actions.advantage * actions.log_prob, {}


@declares("group")
def reg_grpo(actions: Actions, *, scale: Positive | None = None, eps: Positive = 1e-4) -> Losses:
    """Reg-GRPO (arXiv 2506.07464): regress the advantage from the row's log-ratio, without clip or minimum.

    The prediction is (rho - mean_g rho) / std_g rho, rho = log pi / pi_old of the row: what the closed form of the
    KL-regularised optimum says of a reward that is normalised in its group. One loss a row, on each of its actions.
    With normalised advantages the mean loss of a group is 2 (1 - their correlation with rho). After accounts of the
    paper; its text and code were not at hand.

    Args:
        scale: factor of rho - mean_g rho in the place of the division; the loss then has a size that other terms can
            be weighed against, on the weights that sampled too, where all rho are 0.
        eps: added to the deviation in squares: std^2 + eps^2, which has a gradient where the deviation is 0.
    """
    rho = masked_sum(actions.log_prob - actions.old_log_prob, actions.mask)
    centred = rho - group_mean_std(rho, actions.group)[0]
    if scale is None:
        variance, _ = group_mean_std(centred**2, actions.group)
        predicted = centred * (variance + eps**2).rsqrt()
    else:
        predicted = scale * centred
    target = masked_mean(actions.advantage, actions.mask)
    return ((target - predicted) ** 2)[:, None].expand_as(actions.log_prob), {}


@declares("group")
def pacs(actions: Actions, *, beta: Positive = 1.0, weighting: Literal["none", "balanced"] = "none") -> Losses:
    """PACS (arXiv 2509.02522): the verdict is a label, and the row's score is fitted to it by cross-entropy.

    The score is the leave-one-out advantage of beta * log pi / pi_old within the group. One loss a row, on each of its
    actions. Rewards are labels in [0, 1]; the advantages are not used.

    Args:
        weighting: 'balanced' gives right and wrong members of a group the same total weight.
    """
    rho = beta * masked_sum(actions.log_prob - actions.old_log_prob, actions.mask)
    mean, _ = group_mean_std(rho, actions.group)
    count = (actions.group[:, None] == actions.group).sum(1).to(rho.dtype)
    score = (rho - mean) * count / (count - 1).clamp(min=1)
    label = actions.reward.to(rho.dtype)
    weight = torch.ones_like(rho)
    if weighting == "balanced":
        right, _ = group_mean_std(label, actions.group)
        label_chance = torch.where(label > 0.5, right, 1 - right)
        weight = torch.where((right > 0) & (right < 1), 0.5 / label_chance.clamp(min=1e-6), weight)
    loss = F.binary_cross_entropy_with_logits(score, label, weight, reduction="none")
    return loss[:, None].expand_as(actions.log_prob), {}


@declares("action")
def sapo(actions: Actions, *, temperature: Positive = 1.0, temperature_negative: Positive = 1.05) -> Losses:
    """SAPO (arXiv 2511.20347): -A 4 sigmoid(tau (r - 1)) / tau: the weight falls off smoothly on both sides of r = 1.

    Args:
        temperature: tau of actions with a positive advantage; `temperature_negative` of all others.
    """
    tau = torch.where(actions.advantage > 0, temperature, temperature_negative)
    return -actions.advantage * (tau * (actions.ratio - 1)).sigmoid() * 4 / tau, {}


@declares("row")
def gmpo(actions: Actions, *, clip_range: Positive = 0.4, clip_range_high: Positive | None = None) -> Losses:
    """GMPO (arXiv 2507.20673): -A times the geometric mean of a row's ratios, each clipped before, as PPO clips.

    One loss a row, on each of its actions; the clip is of log-ratios, exp(+-0.4) in the paper.

    Args:
        clip_range_high: upper clip; default clip_range.
    """
    high = clip_range_high or clip_range
    log_ratio = (actions.log_prob - actions.old_log_prob).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    near = log_ratio.clamp(-clip_range, high)
    worse = torch.where(actions.advantage > 0, torch.minimum(log_ratio, near), torch.maximum(log_ratio, near))
    advantage = masked_mean(actions.advantage, actions.mask)
    loss = -advantage * masked_mean(worse, actions.mask).exp()
    return loss[:, None].expand_as(log_ratio), {"policy/clip_fraction": (worse != log_ratio).float()}


@declares("row", ratio_of_rows=True, aggregation="sum")
def luspo(actions: Actions, *, clip_range: Positive = 3e-4, clip_range_high: Positive | None = 4e-4) -> Losses:
    """LUSPO (arXiv 2602.05261): `gspo` whose rows are summed up, so that a long one does not count less an action."""
    return gspo(actions, clip_range=clip_range, clip_range_high=clip_range_high)


@declares("row", aggregation="token")
def vespo(
    actions: Actions,
    *,
    power: Positive = 2.0,
    decay: Positive = 3.0,
    power_negative: Positive = 3.0,
    decay_negative: Positive = 2.0,
) -> Losses:
    """VESPO (arXiv 2602.10693): -sg(phi(w)) A log pi with w the product of a row's ratios.

    phi(w) = w^k exp(lambda (1 - w)) is 1 at w = 1 and falls to 0 on both sides. TRL multiplies w by what `off_policy`
    corrects; here that weighs the loss.

    Args:
        power: k of positive advantages, and of 0; `power_negative` of negative ones.
        decay: lambda, likewise.
    """
    log_ratio = (actions.log_prob - actions.old_log_prob).detach().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    log_w = masked_sum(log_ratio, actions.mask)[:, None].clamp(math.log(1e-8), LARGEST_LOG_RATIO)
    good = actions.advantage >= 0
    k, rate = torch.where(good, power, power_negative), torch.where(good, decay, decay_negative)
    weight = (rate + k * log_w - rate * log_w.exp()).exp()
    return -weight * actions.advantage * actions.log_prob, {}


# a denoising step, which has a density and no chance, is never shown in whole rows
@declares("row", aggregation="token")
def dppo(
    actions: Actions,
    *,
    divergence: Literal["tv", "kl"] = "tv",
    threshold: Positive = 0.15,
    threshold_high: Positive | None = None,
    largest: Positive = 20.0,
) -> Losses:
    """DPPO's binary forms (arXiv 2602.04879, and verl's dppo_tv and dppo_kl): -sg(min(r, largest)) A log pi.

    0 where an action moves away in its advantage's direction and the divergence of "this action or another" is above
    the threshold: of the ratio only as much is forbidden as changes the distribution.

    Args:
        divergence: 'tv', |p - p_old|; 'kl', that of the two-way distribution, old to new.
        threshold: largest divergence of actions with a negative advantage; verl takes its clip_ratio. For 'kl' others
            have 0.05.
        threshold_high: of positive ones; default threshold.
    """
    chance, old = actions.log_prob.detach().exp(), actions.old_log_prob.exp()
    if divergence == "tv":
        moved = (chance - old).abs()
    else:
        others = ((1 - old + 1e-8) / (1 - chance + 1e-8)).log()
        moved = old * (actions.old_log_prob - actions.log_prob.detach()) + (1 - old) * others
    up, high = actions.advantage > 0, threshold_high or threshold
    away = torch.where(up, chance > old, chance < old)
    cut = away & (moved > torch.where(up, high, threshold))
    ratio = actions.ratio.detach().clamp(max=largest)
    return -ratio * actions.advantage * actions.log_prob * ~cut, {"policy/clip_fraction": cut.float()}


def covariance(actions: Actions) -> Tensor:
    """[N, T] each action's part of the covariance of log-probability and advantage, -inf where none was drawn.

    It drives the entropy down (arXiv 2505.22617). Means are over the micro-batch's actions, as in verl.
    """
    log_prob, mask = actions.log_prob.detach(), actions.mask
    apart = (actions.advantage - actions.advantage[mask].mean()) * (log_prob - log_prob[mask].mean())
    return apart.where(mask, -math.inf)


@declares("row", aggregation="token")
def clip_cov(
    actions: Actions,
    *,
    clip_range: Positive = 0.2,
    clip_range_high: Positive | None = None,
    share: Positive = 2e-4,
    lowest: float = 1.0,
    highest: float = 5.0,
) -> Losses:
    """Clip-Cov (arXiv 2505.22617): PPO's clip, and a few actions of a high covariance do not learn.

    Args:
        share: share of the actions, at least one, chosen at random among those whose covariance is between `lowest` and
            `highest`.
    """
    losses, values = ppo(actions, clip_range=clip_range, clip_range_high=clip_range_high)
    apart = covariance(actions)
    found = ((apart > lowest) & (apart < highest) & (values["policy/clip_fraction"] == 0)).nonzero()
    # alike in a resumed run: the choice follows from the numbers alone
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(len(found)))
    chosen = found[order[: max(1, int(share * actions.mask.sum()))].to(found.device)]
    kept = torch.ones_like(losses)
    kept[chosen[:, 0], chosen[:, 1]] = 0
    return losses * kept, {"policy/clip_fraction": 1 - kept}


@declares("row", aggregation="token")
def kl_cov(actions: Actions, *, share: Positive = 2e-4, coefficient: Positive = 1.0) -> Losses:
    """KL-Cov (arXiv 2505.22617): -A r without a clip, plus coefficient |log r| where the covariance is highest.

    Args:
        share: share of the actions that are held, at least one.
    """
    highest = max(1, int(share * actions.mask.sum()))
    apart = covariance(actions).flatten()
    held = torch.zeros_like(apart).index_fill(0, apart.topk(highest).indices, 1).view_as(actions.log_prob)
    gap = (actions.log_prob - actions.old_log_prob).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).abs()
    return -actions.advantage * actions.ratio + coefficient * held * gap, {"policy/clip_fraction": held}


LOSSES: dict[str, Callable[..., Losses]] = {
    "ppo": ppo,
    "reinforce": reinforce,
    "gspo": gspo,
    "cispo": cispo,
    "dro": dro,
    "sapo": sapo,
    "gmpo": gmpo,
    "luspo": luspo,
    "vespo": vespo,
    "dppo": dppo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "reg_grpo": reg_grpo,
    "pacs": pacs,
}
