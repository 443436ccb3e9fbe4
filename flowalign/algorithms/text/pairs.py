"""Pairs of texts as preference losses take them, and what of them stands in the metrics."""

from torch import Tensor

from flowalign.core.preferences import Pairs
from flowalign.core.record import masked_sum
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.rollout import TextRollout


def pairs_of(policy: LanguagePolicy, rollout: TextRollout, reference: Tensor, items: Tensor) -> Pairs:
    """Pairs of texts with the policy's log-probabilities.

    Args:
        reference: [B] log-probabilities of the rollout's texts under the reference.
        items: [N, 2] rows of the preferred and of the other texts.
    """
    rows = items.T.flatten()
    mask = rollout.mask[rows]
    chosen, rejected = masked_sum(policy.log_probs(rollout, rows)[0], mask).chunk(2)
    reference_chosen, reference_rejected = reference[rows].chunk(2)
    chosen_tokens, rejected_tokens = mask.sum(1).chunk(2)
    return Pairs(
        chosen=chosen,
        rejected=rejected,
        reference_chosen=reference_chosen,
        reference_rejected=reference_rejected,
        chosen_tokens=chosen_tokens,
        rejected_tokens=rejected_tokens,
    )


def judged(pairs: Pairs) -> dict[str, Tensor]:
    """[N] values of pairs for the metrics; a tie counts half."""
    margin = pairs.margin.detach()
    return {
        "preference/accuracy": (margin > 0).float() + (margin == 0) / 2,
        "preference/margin": margin,
        "preference/chosen_gain": pairs.chosen_gain.detach(),
        "preference/rejected_gain": pairs.rejected_gain.detach(),
    }
