"""Divergences between policies, one value an action."""

from torch import Tensor


def gaussian_kl(mean: Tensor, mean_reference: Tensor, std: Tensor) -> Tensor:
    """KL(N(mean, std) || N(mean_reference, std)), the mean over the elements of a sample.

    Args:
        mean, mean_reference: [N, ...].
        std: broadcasts against them, > 0; the two Gaussians share it.

    Returns:
        [N]. The mean, not the sum, to match log-probabilities that are means.
    """
    return ((mean - mean_reference) ** 2 / (2 * std**2)).flatten(1).mean(1)
