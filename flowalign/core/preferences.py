"""Losses on pairs of which one was preferred."""

from torch import Tensor
from torch.nn import functional as F


def diffusion_dpo_logit(
    chosen: Tensor, rejected: Tensor, chosen_reference: Tensor, rejected_reference: Tensor, beta: float
) -> Tensor:
    """How much more the policy than the reference prefers the chosen sample: [N] (Diffusion-DPO, 2311.12908, eq. 14).

    -beta / 2 * ((chosen - chosen_reference) - (rejected - rejected_reference)), as in the authors' code, where beta
    stands for the paper's beta * T * weight; 0 where the policy is the reference.

    Args:
        chosen, rejected, chosen_reference, rejected_reference: [N] squared errors of what the policy and the
            reference predict, the mean over elements.
        beta: the larger, the closer the policy stays to the reference.
    """
    return -beta / 2 * ((chosen - chosen_reference) - (rejected - rejected_reference))


def preference_loss(logit: Tensor) -> Tensor:
    """[N] minus the log-probability that the chosen one wins under Bradley and Terry's model; log 2 at logit 0."""
    return -F.logsigmoid(logit)
