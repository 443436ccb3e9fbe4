"""How unlikely a sample is by its matching error: what stands for minus its log-probability (AWM, arXiv 2509.25050)."""

from typing import Literal

from torch import Tensor

Weighting = Literal["uniform", "t", "t**2", "huber", "ghuber"]
LEAST_ERROR = 1e-10


def weighted_error(error: Tensor, t: Tensor, weighting: Weighting, power: float = 0.25) -> Tensor:
    """[N] a function of errors [N] at noise levels t [N]: e, t e, t^2 e, t sqrt(e), or t e^power / power (ghuber)."""
    if weighting == "uniform":
        return error
    if weighting == "t":
        return t * error
    if weighting == "t**2":
        return t**2 * error
    if weighting == "huber":
        return t * ((error + LEAST_ERROR).sqrt() - LEAST_ERROR**0.5)
    return t * ((error + LEAST_ERROR) ** power - LEAST_ERROR**power) / power
