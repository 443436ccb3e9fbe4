"""Noise levels to learn from, by name: a function of its settings, -> the levels of one sample.

Whole numbers are points of the rollout's own schedule, others are levels in (0, 1) before the pipeline's shift, which
then applies to them.
"""

from collections.abc import Callable
from typing import Annotated

import torch
from pydantic import Field
from torch import Generator, Tensor

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]

EDGE = 1e-3
"""Distance of drawn levels from 0 and 1, where a sample is all noise or none."""


def schedule(
    steps: int,
    generator: Generator,
    *,
    count: Count | None = None,
    first: Annotated[int, Field(ge=0)] = 0,
    end: Count | None = None,
    stratified: bool = False,
) -> Tensor:
    """[count] different points of a schedule of so many steps, in random order.

    Args:
        count: default 99% of the steps, rounded down, as in DiffusionNFT's code (arXiv 2509.16117).
        first: the first point to draw from, 0 being all noise.
        end: the point after the last one to draw from; default all.
        stratified: one of each of `count` equal parts of the points.
    """
    end = steps if end is None else min(end, steps)
    count = max(1, int(steps * 0.99)) if count is None else count
    if not 0 < count <= end - first:
        raise ValueError(f"{count} points of the schedule cannot be drawn from its steps {first} to {end - 1}")
    if not stratified:
        return first + torch.randperm(end - first, generator=generator)[:count]
    bounds = first + torch.arange(count + 1) * (end - first) // count
    return bounds[:-1] + (torch.rand(count, generator=generator) * bounds.diff()).long()


def uniform(
    steps: int,
    generator: Generator,
    *,
    count: Count = 1,
    low: Share = 0.0,
    high: Share = 1.0,
    stratified: bool = True,
) -> Tensor:
    """[count] levels, evenly distributed between two.

    Args:
        stratified: one in each of `count` equal parts.
    """
    return low + (high - low) * _shares(count, generator, stratified)


def logit_normal(
    steps: int,
    generator: Generator,
    *,
    count: Count = 1,
    mean: float = 0.0,
    std: Annotated[float, Field(gt=0)] = 1.0,
    shift: Annotated[float, Field(gt=0)] = 1.0,
    stratified: bool = True,
) -> Tensor:
    """[count] levels, the logistic function of a normal, as SD3 was trained (arXiv 2403.03206).

    Args:
        shift: a further one, s -> shift * s / (1 + (shift - 1) * s), before the pipeline's own.
        stratified: one of each of `count` equally probable parts.
    """
    level = (mean + std * torch.special.ndtri(_shares(count, generator, stratified))).sigmoid()
    return shift * level / (1 + (shift - 1) * level)


def _shares(count: int, generator: Generator, stratified: bool) -> Tensor:
    draws = torch.rand(count, generator=generator).clamp(EDGE, 1 - EDGE)
    return (torch.arange(count) + draws) / count if stratified else draws


LEVELS: dict[str, Callable[..., Tensor]] = {"schedule": schedule, "uniform": uniform, "logit_normal": logit_normal}
