"""Texts of a server, compared with what the policy makes of them."""

import math
from collections.abc import Sequence

import torch

from flowalign.policies.language.decoding import Decoding
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.rollout import TextRollout
from flowalign.policies.language.teacher_forcing import rescored

ROUNDED, ROUNDED_16 = 1e-4, 5e-3
"""Mean distances of log-probabilities that are rounding, in float32 and in 16 bits."""
ALIKE = -20.0
"""Log-probability below which draws are not alike by chance."""


@torch.no_grad()
def unlike(policy: LanguagePolicy, rollout: TextRollout, limit: float, raw: str) -> str | None:
    """How log-probabilities of texts differ from a replay's, and what explains them better; None where they are alike.

    Args:
        limit: mean distance that is taken where the policy computes in 16 bits.
        raw: what helps where log-probabilities are of the bare logits.
    """
    with policy.uncounted():
        distance = apart(policy, rollout, rollout.decoding)
        cause = _cause(policy, rollout, distance, limit, raw)
    return None if cause is None else f"{distance:.2g} from the policy's on average: {cause}"


def apart(policy: LanguagePolicy, rollout: TextRollout, decoding: Decoding) -> float:
    """Mean distance of the log-probabilities from a replay's."""
    replayed = rescored(policy, rollout, decoding=decoding)
    return float((replayed.log_prob - rollout.log_prob).abs()[rollout.mask].mean())


def _cause(policy: LanguagePolicy, rollout: TextRollout, distance: float, limit: float, raw: str) -> str | None:
    exact = policy.compute_dtype == torch.float32
    if distance <= (ROUNDED if exact else ROUNDED_16):
        return None
    drawn = rollout.decoding
    for decoding in (Decoding(), Decoding(temperature=drawn.temperature)):
        if decoding != drawn and apart(policy, rollout, decoding) < distance / 2:
            return f"they are of the logits before rollout's temperature, top_p and the like; {raw}"
    if policy.lora or policy._reference is not None:
        with policy.reference():
            if apart(policy, rollout, drawn) < distance / 2:
                return "they are of the start weights: the server ignores the weights that it is given"
    if not exact and distance <= limit:
        return None
    return "the server has another model, other weights or another precision (model.path, model.dtype)"


def all_alike(texts: Sequence[Sequence[int]], log_prob: Sequence[float], group: Sequence[int]) -> bool:
    """Are all texts of each prompt one text, though it is improbable that they are?

    Args:
        texts: token ids.
        log_prob: of each text.
        group: number of each text's prompt.
    """
    chance: list[float] = []
    for number in set(group):
        rows = [row for row, other in enumerate(group) if other == number]
        if any(list(texts[row]) != list(texts[rows[0]]) for row in rows):
            return False
        chance += [log_prob[row] for row in rows[1:]]
    return math.fsum(chance) < ALIKE
