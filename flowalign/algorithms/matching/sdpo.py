"""Diffusion-SDPO: preferences whose rejected picture may not spoil the chosen one (arXiv 2511.03317).

Of any loss of pairs the gradient of the rejected picture's error is scaled by lambda <= 1. With g_w and g_l the
gradients of the two errors in the network's output, lambda = (1 - mu) |g_w|^2 / (g_w . g_l) where they point the same
way and it is below 1: along the update the chosen one's error then falls by at least mu |g_w|^2, to first order.

The losses: Diffusion-DPO's (2311.12908); DSPO's, the chosen picture's error of a prediction that is moved away from the
reference's by beta (1 - sigmoid(logit)); and DMPO's, the divergence of the pair's Bernoulli(sigmoid(logit)) from
Bernoulli(1 - alpha).

Departure: a lambda for every pair; the authors have one for the pairs of a micro-batch.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from flowalign.algorithms.matching.base import Points
from flowalign.algorithms.matching.pairs import PairMatching, PairSettings, judged
from flowalign.core.step_losses import preference_loss


class SDPOSettings(PairSettings):
    pair_loss: Literal["dpo", "dspo", "dmpo"] = "dpo"
    """Loss whose gradient is made safe."""
    beta: float = Field(5000.0, gt=0)
    """Factor of the squared error's mean over elements; published: 5000, dspo 0.001, dmpo 2000."""
    mu: float = Field(0.9, ge=0, le=1)
    """Share of the chosen one's descent that stays; published: 0.9 for SD1.5, 0.6 for SDXL, 0.2 with dspo."""
    alpha: float = Field(0.01, gt=0, lt=0.5)
    """Rate at which people choose the worse one, for dmpo."""


class SDPO(PairMatching):
    """Diffusion-SDPO: the rejected picture's gradient is limited so that the chosen one's error falls (2511.03317)."""

    name = "sdpo"
    Settings = SDPOSettings
    settings: SDPOSettings
    compares = frozenset({"reference"})

    def loss(self, points: Points) -> tuple[Tensor, dict[str, Tensor]]:
        settings = self.settings
        chosen, rejected = points.error.chunk(2)
        off_chosen, off_rejected = (points.velocity.detach() - points.noised.velocity).chunk(2)
        scale = safe_scale(off_chosen, off_rejected, settings.mu)
        chosen_reference, rejected_reference = points.error_reference.chunk(2)
        gain = chosen_reference - chosen
        logit = settings.beta / 2 * (gain - (rejected_reference - with_gradient(rejected, scale)))
        if settings.pair_loss == "dpo":
            loss = preference_loss(logit)
        elif settings.pair_loss == "dspo":
            loss = self._shifted_error(points, logit)
        else:
            loss = bernoulli_kl(logit, 1 - settings.alpha)
        values = judged(logit, gain, rejected_reference - rejected)
        return loss, values | {"sdpo/scale": scale}

    def _shifted_error(self, points: Points, logit: Tensor) -> Tensor:
        """[N] DSPO's."""
        assert points.reference is not None
        noised, velocity, reference = points.noised, points.velocity, points.reference
        shift = self.settings.beta * (1 - logit.sigmoid()).repeat(2)
        moved = velocity - shift.view(-1, *[1] * (velocity.dim() - 1)) * (velocity - reference)
        return noised.error(moved).chunk(2)[0]


def safe_scale(chosen: Tensor, rejected: Tensor, mu: float) -> Tensor:
    """[N] lambda in [0, 1] of pairs, from the errors' gradients in the network's output, [N, ...] each."""
    chosen, rejected = chosen.flatten(1), rejected.flatten(1)
    along = (chosen * rejected).sum(1)
    limit = (1 - mu) * chosen.square().sum(1) / along.where(along > 0, 1)
    return torch.where(along > 0, limit.clamp(max=1), 1)


def with_gradient(error: Tensor, scale: Tensor) -> Tensor:
    """[N] the same values, with a gradient times [N] a scale."""
    return error.detach() + scale * (error - error.detach())


def bernoulli_kl(logit: Tensor, wanted: float) -> Tensor:
    """[N] KL of Bernoulli(sigmoid(logit)) from Bernoulli(wanted)."""
    q = torch.tensor(wanted).to(logit)
    p = logit.sigmoid()
    return p * (F.logsigmoid(logit) - q.log()) + (1 - p) * (F.logsigmoid(-logit) - (1 - q).log())
