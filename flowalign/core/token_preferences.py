"""Losses of pairs of texts whose tokens have rewards of their own, one value a pair."""

import torch
from torch import Tensor
from torch.nn import functional as F

from flowalign.core.preferences import logistic
from flowalign.core.record import masked_mean, masked_sum


def token_guided(gain: Tensor, guide: Tensor, mask: Tensor, beta: float, alpha: float) -> Tensor:
    """[N] DPO whose tokens move the further from the reference the more they earn (TGDPO, arXiv 2506.14574, as its
    authors' code).

    Args:
        gain: [2 N, T] log-ratios of the tokens to the reference, of the preferred texts and then of the others.
        guide: [2 N, T] rewards of the tokens.
        mask: [2 N, T] bool.
        alpha: how much a token's reward counts.
    """
    good, bad = gain.chunk(2)
    good_guide, bad_guide = guide.chunk(2)
    good_mask, bad_mask = mask.chunk(2)
    chosen = masked_sum(beta * (1 + alpha * good_guide) * good, good_mask)
    return -F.logsigmoid(chosen - masked_sum(beta * (1 - alpha * bad_guide) * bad, bad_mask))


def token_regularised(gain: Tensor, guide: Tensor, mask: Tensor, beta: float, alpha: float) -> Tensor:
    """[N] DPO plus alpha times the mean squared distance of the tokens' implicit rewards from rewards that the model
    gave itself (T-REG, arXiv 2412.02685, after the abstract); arguments as of `token_guided`."""
    total = masked_sum(gain, mask)
    chosen, rejected = total.chunk(2)
    apart = masked_mean((beta * gain - guide) ** 2, mask)
    return logistic(beta * (chosen - rejected)) + alpha * torch.stack(apart.chunk(2)).mean(0)
