"""GRPO's advantages, sharpened: by a curve over rewards, by what is rare, by each step's divergence, by token."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from flowalign.core.groups import Positive, Share, declares, group_advantage, group_mean_std, returns_of
from flowalign.core.record import Record, masked_mean

Sign = Annotated[float, Field(ge=-1, le=1)]


def asymmetric(
    record: Record,
    *,
    threshold: float = 0.8,
    above: Share = 0.01,
    steepness: Positive = 1.0,
    eps: Positive = 1e-6,
    unbiased: bool = True,
) -> Tensor:
    """GRPO on rewards in [0, 1], squeezed above a threshold and stretched below (TempSamp-R1, arXiv 2509.18056).

    Above: t + above log(1 + r - t); below: t - (exp(s (t - r)) - 1) / (exp(s) - 1), so that a right answer from outside
    does not dwarf the rest of its group. `visurf` puts that answer into the group. Formula and numbers are those of a
    public reimplementation (ZhangZikun6666/TempSamp-R1); the paper was not at hand.
    """
    apart = record.reward - threshold
    high = threshold + above * apart.clamp(min=0).log1p()
    low = threshold - torch.expm1(steepness * -apart) / torch.expm1(torch.as_tensor(steepness))
    return group_advantage(torch.where(apart >= 0, high, low), record.group, eps=eps, unbiased=unbiased)


def novel(
    record: Record, *, weight: Positive = 2.5, most: Share = 0.5, eps: Positive = 1e-6, unbiased: bool = True
) -> Tensor:
    """XRPO's sharpening (arXiv 2510.06672): good members that were unlikely gain A + min(weight (1 - eta), most A).

    eta = exp(s - mean_g s) with the text's mean log-probability s; likelier than its group, or A <= 0: A alone. The
    selection `uncertain` is the paper's allocation. Formula and numbers after accounts of the paper.
    """
    advantage = group_advantage(record.reward, record.group, eps=eps, unbiased=unbiased)
    likelihood = masked_mean(record.log_prob, record.mask)
    mean, _ = group_mean_std(likelihood, record.group)
    bonus = (weight * (1 - (likelihood - mean).exp())).clamp(min=0)
    return advantage + torch.minimum(bonus, most * advantage.clamp(min=0))


@declares("reference")
def process_kl(
    record: Record,
    *,
    eta: Positive = 200.0,
    step: Annotated[int, Field(ge=1)] = 256,
    eps: Positive = 1e-6,
    unbiased: bool = True,
) -> Tensor:
    """PRL (arXiv 2601.10201, and the authors' code): GRPO less what the rest of the text diverges. -> [B, T]

    A_t = A - 1 / eta sum over the tokens from the end of t's step on of log pi / pi_ref: the KL-regularised objective,
    divided among steps. For rewards alone; `kl_weight` would count the divergence twice.

    Args:
        record: with `reference`.
        eta: inverse weight of the divergence.
        step: tokens of a step; the last one may be shorter.
    """
    assert record.reference is not None
    mask = record.mask
    advantage = group_advantage(record.reward, record.group, eps=eps, unbiased=unbiased)
    left = returns_of((record.log_prob - record.reference).where(mask, 0), mask, 1.0)
    position = torch.arange(mask.shape[1], device=mask.device)
    last = (mask.sum(1, keepdim=True) - 1).clamp(min=0)
    end = torch.minimum(position // step * step + step - 1, last)
    return (advantage[:, None] - left.gather(1, end) / eta).where(mask, 0)


@declares("influence")
def hidden_reward(
    record: Record, *, bias: Sign = 0.1, threshold: Share = 1.0, eps: Positive = 1e-6, unbiased: bool = True
) -> Tensor:
    """Token Hidden Reward (arXiv 2510.03669): tokens learn by how they move right texts. -> [B, T]

    THR = sign(A) times the token's `influence` on the group's right texts. A (1 + bias sign(THR)) where |THR| is above
    the threshold, 0 elsewhere; a bias above 0 exploits, below 0 explores. Groups that are all right or all wrong: A.

    After the abstract, reviews of the paper, and the rule of the authors' earlier NTHR (2505.18830) for the threshold.

    Args:
        record: with `influence`; rewards above 1/2 are right.
        threshold: factor of the smallest mean influence of a right text on the group's.
    """
    assert record.influence is not None
    mask, group, right = record.mask, record.group, record.reward > 0.5
    advantage = group_advantage(record.reward, group, eps=eps, unbiased=unbiased)[:, None].expand_as(mask)
    same = group[:, None] == group
    mixed = (same & right).any(1) & (same & ~right).any(1)
    typical = masked_mean(record.influence, mask)
    least = typical.where(right, torch.inf).expand_as(same).where(same, torch.inf).amin(1)
    reward = advantage.sign() * record.influence
    kept = advantage * (1 + bias * reward.sign()) * (reward.abs() > threshold * least[:, None])
    return torch.where(mixed[:, None], kept, advantage).where(mask, 0)


def influence_of(error: Tensor, hidden: Tensor, right: Tensor) -> Tensor:
    """[M] how much raising each token raises the log-probability of the tokens of right texts, to first order.

    sum_k <g, g_k> <h, h_k> over their tokens k: the inner product of the gradients by the output head's weights
    (arXiv 2505.18830).

    Args:
        error: [M, V] g, the drawn token's one-hot vector less the distribution; of V columns that matter.
        hidden: [M, H] h, what the head got.
        right: [M] bool.
    """
    return ((error @ (error[right].T @ hidden[right])) * hidden).sum(1)
