"""Guidance in other ways than by two copies of the batch in one call."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowalign.policies.diffusion.families.base import Family


class TrueGuidance(Family):
    """Classifier-free guidance by two calls a step, the positive one first."""

    guidance = "two calls a step"
    unconditional = 1

    def velocity(self, outputs: Sequence[Any], copies: Sequence[int], guidance: float) -> Tensor:
        if len(outputs) == 1:
            return outputs[0]
        positive, negative = outputs
        return negative + guidance * (positive - negative)


class DistilledGuidance(Family):
    """The guidance scale is an input of the network."""

    guidance = "embedded"

    def negative(self, guidance: float) -> bool:
        return False


def rescaling(positive: Tensor, guided: Tensor) -> Tensor:
    """Factor that brings a guided velocity back to the norm of the positive one, along the last axis."""
    return torch.norm(positive, dim=-1, keepdim=True) / torch.norm(guided, dim=-1, keepdim=True)
