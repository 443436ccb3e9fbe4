"""The noises of one sample, improved step by step along the gradient of its reward."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from flowalign.search.engine import Engine

Generate = Callable[[], Tensor]
"""() -> [1, ...] the finished sample of the present noises."""
Loss = Callable[[Tensor, float], Tensor]
"""(sample [1, ...], its score) -> value to minimise."""


def optimize(
    engine: Engine,
    noises: Sequence[Tensor],
    optimizer: Optimizer,
    generate: Generate,
    loss: Loss,
    count: int,
    clip: float,
) -> None:
    """Score a sample, move its noises, and again; the last is scored alone.

    Args:
        noises: noises that the optimizer moves.
        count: samples.
        clip: largest norm of the gradient.
    """
    end, node = torch.tensor([engine.steps]), None
    for i in range(count):
        learns = i < count - 1
        for noise in noises:
            noise.requires_grad_(learns)
        with torch.set_grad_enabled(learns):
            x = generate()
        p = engine.score(engine.particles(x.detach(), end, node))
        node = p.node
        if learns:
            with torch.enable_grad():
                gradients = torch.autograd.grad(loss(x, float(p.score)), noises)
            for noise, gradient in zip(noises, gradients, strict=True):
                noise.grad = gradient
            torch.nn.utils.clip_grad_norm_(noises, clip)
            optimizer.step()
    for noise in noises:
        noise.requires_grad_(False)
