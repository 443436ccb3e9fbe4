"""Policy losses by name: each takes stored actions under the weights of now, and its settings. -> [B, T]

Those in `WHOLE_ROWS` look at all actions of a row, those in `WHOLE_GROUPS` at all rows of a group as well; the others
at one action at a time, so that they serve denoising steps too, whose losses are computed in any order.
"""

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from flowalign.core.advantages import group_mean_std
from flowalign.core.losses import clipped_policy_loss
from flowalign.core.record import Scored, ScoredTokens, masked_mean, masked_sum

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0)]


def ppo(
    scored: Scored,
    *,
    clip_range: Positive = 0.2,
    clip_range_high: Positive | None = None,
    dual_clip: Annotated[float, Field(gt=1)] | None = None,
) -> Tensor:
    """PPO's clip (arXiv 1707.06347), with DAPO's clip-higher (2503.14476) and the dual clip (1912.09729)."""
    high = clip_range if clip_range_high is None else clip_range_high
    return clipped_policy_loss(scored.log_prob, scored.old_log_prob, scored.advantage, clip_range, high, dual_clip)


def reinforce(scored: Scored) -> Tensor:
    """REINFORCE: -A log pi. On the weights that sampled it has the gradient of every loss with a ratio."""
    return -scored.advantage * scored.log_prob


def gspo(scored: ScoredTokens, *, clip_range: Positive = 3e-4, clip_range_high: Positive | None = 4e-4) -> Tensor:
    """GSPO (arXiv 2507.18071): PPO's clip with the geometric mean of a row's ratios in the place of each one.

    In the token form of the paper's section 4.3: every action's gradient is scaled by the row's ratio, and the loss
    is to be averaged over a row first (aggregation 'sequence').
    """
    high = clip_range if clip_range_high is None else clip_range_high
    row = masked_mean(scored.log_prob - scored.old_log_prob, scored.mask).detach()[:, None]
    log_ratio = row + scored.log_prob - scored.log_prob.detach()
    return clipped_policy_loss(log_ratio, torch.zeros_like(log_ratio), scored.advantage, clip_range, high)


def cispo(scored: Scored, *, clip_range: Positive | None = None, clip_range_high: Positive = 4.0) -> Tensor:
    """CISPO (arXiv 2506.13585): -sg(clip(r)) A log pi: the weight is clipped, never the gradient of an action.

    Args:
        clip_range: the weight's lower bound is 1 - clip_range; None: none, as published.
    """
    ratio = (scored.log_prob - scored.old_log_prob).exp().detach()
    ratio = ratio.clamp(None if clip_range is None else 1 - clip_range, 1 + clip_range_high)
    return -ratio * scored.advantage * scored.log_prob


def reg_grpo(scored: ScoredTokens, *, scale: Positive = 1.0) -> Tensor:
    """Reg-GRPO (arXiv 2506.07464): regress the advantage from the row's log-ratio, without clip or minimum.

    The prediction is scale * (rho - mean_g rho), rho = log pi / pi_old of the row: what the closed form of the
    KL-regularised optimum says of a reward that is centred in its group. One loss a row, on each of its actions.

    Departure, from what summaries of the paper say (its text was not at hand): there the prediction is normalised in
    the group; here it is centred and `scale` takes the place of the division by rho's standard deviation, which is 0 on
    the weights that sampled.
    """
    rho = masked_sum(scored.log_prob - scored.old_log_prob, scored.mask)
    mean, _ = group_mean_std(rho, scored.group)
    target = masked_mean(scored.advantage, scored.mask)
    return ((target - scale * (rho - mean)) ** 2)[:, None].expand_as(scored.log_prob)


def pacs(scored: ScoredTokens, *, beta: Positive = 1.0, weighting: Literal["none", "balanced"] = "none") -> Tensor:
    """PACS (arXiv 2509.02522): the verdict is a label, and the row's score is fitted to it by cross-entropy.

    The score is the leave-one-out advantage of beta * log pi / pi_old within the group. One loss a row, on each of its
    actions. Rewards are labels in [0, 1]; the advantages are not used.

    Args:
        weighting: 'balanced' gives right and wrong members of a group the same total weight.
    """
    rho = beta * masked_sum(scored.log_prob - scored.old_log_prob, scored.mask)
    mean, _ = group_mean_std(rho, scored.group)
    count = (scored.group[:, None] == scored.group).sum(1).to(rho.dtype)
    score = (rho - mean) * count / (count - 1).clamp(min=1)
    label = scored.reward.to(rho.dtype)
    weight = torch.ones_like(rho)
    if weighting == "balanced":
        right, _ = group_mean_std(label, scored.group)
        own = torch.where(label > 0.5, right, 1 - right)
        weight = torch.where((right > 0) & (right < 1), 0.5 / own.clamp(min=1e-6), weight)
    loss = F.binary_cross_entropy_with_logits(score, label, weight, reduction="none")
    return loss[:, None].expand_as(scored.log_prob)


WHOLE_ROWS = {"gspo", "reg_grpo", "pacs"}
WHOLE_GROUPS = {"reg_grpo", "pacs"}
