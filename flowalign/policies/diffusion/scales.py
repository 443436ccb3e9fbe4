"""Scales of classifier-free guidance: one for all denoising steps, or one for each."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flowalign.errors import ConfigError

Scale = float | tuple[float, ...]
"""One scale for all steps, or T scales, one for each step."""


def scale_of(guidance: float | Sequence[float], steps: int) -> Scale:
    """Guidance as it was asked for; scales that are all alike are one.

    Raises:
        ConfigError: a scale below 1, or as many scales as there are no steps.
    """
    scales = tuple(guidance) if isinstance(guidance, Sequence) else (guidance,) * steps
    if len(scales) != steps:
        raise ConfigError(f"guidance: {len(scales)} scales for {steps} steps; give one a step, or one for all")
    if min(scales) < 1:
        raise ConfigError(f"guidance {min(scales)} is below 1; 1 samples without guidance")
    return scales if len(set(scales)) > 1 else scales[0]


def largest(scale: float | Sequence[float]) -> float:
    """The largest scale of any step."""
    return max(scale) if isinstance(scale, Sequence) else scale


def guided_at(velocity: Callable[[float], Tensor], scale: Scale, steps: Tensor) -> Tensor:
    """[N, ...] velocities, each guided by the scale of its step.

    Each scale is a number here, so that the arithmetic is that of one scale for all.

    Args:
        velocity: [N, ...] of a scale.
        steps: [N]; where samples are made in chunks, those of each chunk have the scales again.
    """
    if not isinstance(scale, tuple):
        return velocity(scale)
    first, *others = dict.fromkeys(scale)
    guided = velocity(first)
    for other in others:
        has = torch.tensor([each == other for each in scale]).to(guided.device, non_blocking=True)
        rows = has[steps.to(guided.device) % len(scale)].view(-1, *[1] * (guided.dim() - 1))
        guided = torch.where(rows, velocity(other), guided)
    return guided
