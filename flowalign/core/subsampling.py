"""A random part of what an update could learn from, weighted so that its gradient is the whole one's on average."""

import torch
from torch import Generator, Tensor


def inclusion(size: Tensor, share: float, by_size: float) -> Tensor:
    """[N] probabilities of being drawn, p = share * ((1 - by_size) + by_size * size / mean size), at most 1.

    The part that is alike for all bounds the weights 1 / p by 1 / (share * (1 - by_size)), as in defensive importance
    sampling (Hesterberg 1995).

    Args:
        size: [N] from 0 on, how much each item is expected to teach.
        share: share of the items that are drawn, on average; less where probabilities are cut at 1.
        by_size: 0 draws all alike.
    """
    mean = size.mean()
    relative = size / mean if mean > 0 else torch.ones_like(size)
    return (share * (1 - by_size + by_size * relative)).clamp(max=1)


def subsample(probability: Tensor, generator: Generator) -> Tensor:
    """[N] weights: 1 / p for the items that are drawn and 0 for the others, so that each one's mean is 1.

    Systematic sampling in a random order (Madow 1949): the number drawn is the sum of the probabilities, rounded up or
    down.

    Args:
        probability: [N] of each item, above 0 and at most 1.
        generator: on the CPU.
    """
    order = torch.randperm(len(probability), generator=generator)
    # in float64: a sum over many items must not lose one
    reached = probability.cpu().double()[order].cumsum(0) + torch.rand((), generator=generator, dtype=torch.float64)
    drawn = torch.zeros(len(probability), dtype=torch.bool)
    drawn[order] = reached.floor().diff(prepend=torch.zeros(1, dtype=torch.float64)) > 0
    return drawn.to(probability) / probability
