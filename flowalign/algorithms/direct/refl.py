"""ReFL (arXiv 2304.05977): one step of a random late noise level, and the reward of the x0 predicted there.

Authors' code (THUDM/ImageReward, ReFL.py): 40 steps without guidance, the step drawn from 30 .. 39, loss
1e-3 * relu(2 - ImageReward). The paper's second term, the pre-training loss, is absent there and here.

Departure: every sample draws its own step; theirs one a batch.
"""

from flowalign.algorithms.direct.late_step import LateStep


class ReFL(LateStep):
    """ReFL: the reward of the x0 that one random late step predicts (arXiv 2304.05977)."""

    name = "refl"
