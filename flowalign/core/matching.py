"""Arithmetic of the methods that match velocities to clean samples: one value a sample."""

from torch import Tensor

LEAST_WEIGHT = 1e-5


def optimality(advantage: Tensor, largest: float) -> Tensor:
    """[N] in [0, 1], 1/2 at no advantage: how probably a sample is a good one (DiffusionNFT, arXiv 2509.16117).

    Args:
        advantage: [N].
        largest: the advantage from which on a sample is entirely good.
    """
    return (advantage / largest / 2 + 0.5).clamp(0, 1)


def adaptive_square(off: Tensor) -> Tensor:
    """[N] mean squares of [N, ...], each over the mean size of its own elements, which has no gradient."""
    weight = off.detach().abs().double().flatten(1).mean(1).clamp(min=LEAST_WEIGHT)
    return (off.square().flatten(1).mean(1) / weight).float()
