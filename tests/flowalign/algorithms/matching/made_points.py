"""Samples at noise levels, made by hand: no model is needed to ask what a method's loss is."""

from typing import Any

import torch
from torch import Tensor

from flowalign import registry
from flowalign.algorithms.matching.base import Matching, Points
from flowalign.policies.diffusion import Noised


def method(name: str, **settings: Any) -> Matching:
    """A method with these settings."""
    made = registry.resolve("algorithms", name)
    return made(made.Settings(**settings))


def points(
    velocity: Tensor,
    x0: Tensor,
    noise: Tensor,
    sigma: Tensor,
    advantage: Tensor,
    old: Tensor,
    reference: Tensor,
    size: int = 1,
    reward: Tensor | None = None,
) -> Points:
    """Samples of which `size` are side by side in an item, every item at a level of its own.

    Args:
        reward: default the advantage.
    """
    rows = torch.arange(len(x0))
    noised = Noised(x0, noise, sigma, rows, rows // size, torch.ones(len(x0)))
    reward = advantage if reward is None else reward
    return Points(
        noised=noised,
        velocity=velocity,
        advantage=advantage,
        reward=reward,
        group=rows // size,
        old=old,
        reference=reference,
        size=size,
    )


def gradient(algorithm: Matching, at: Points) -> tuple[Tensor, Tensor]:
    """[N] or one an item: the losses with their penalties, and [N, ...] the gradient of their sum in the velocity."""
    loss, _ = algorithm.loss(at)
    penalty, _ = algorithm.penalized(torch.zeros_like(at.error), at)
    (made,) = torch.autograd.grad(loss.sum() + penalty.sum(), at.velocity, retain_graph=True)
    return loss.detach(), made
