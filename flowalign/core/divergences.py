"""Divergences between policies, one value an action."""

import math
from typing import Literal

from torch import Tensor

from flowalign.core.record import LARGEST_LOG_RATIO


def gaussian_kl(mean: Tensor, mean_reference: Tensor, std: Tensor) -> Tensor:
    """KL(N(mean, std) || N(mean_reference, std)), the mean over the elements of a sample.

    Args:
        mean, mean_reference: [N, ...].
        std: broadcasts against them, > 0; the two Gaussians share it.

    Returns:
        [N]. The mean, not the sum, to match log-probabilities that are means.
    """
    return ((mean - mean_reference) ** 2 / (2 * std**2)).flatten(1).mean(1)


def velocity_mse(velocity: Tensor, velocity_reference: Tensor) -> Tensor:
    """Mean squared difference of two velocities at one state: [N, ...] -> [N].

    What is left of the KL where no step has noise: up to a factor of the step, the KL of two transitions.
    """
    return ((velocity - velocity_reference) ** 2).flatten(1).mean(1)


def gaussian_entropy(std: Tensor) -> Tensor:
    """Entropy of N(., std), the mean over the elements of std: [N, ...] > 0 -> [N]. ReinFlow's bonus (2505.22094)."""
    return std.log().flatten(1).mean(1) + 0.5 * math.log(2 * math.pi * math.e)


def standard_normal_kl(mean: Tensor, std: Tensor) -> Tensor:
    """KL(N(mean, std) || N(0, 1)), the mean over the elements of a sample: [N, ...] twice, std > 0 -> [N]."""
    return ((mean**2 + std**2 - 1) / 2 - std.log()).flatten(1).mean(1)


KLEstimate = Literal["k1", "k2", "k3", "low_var_kl"]
LARGEST_LOW_VAR_KL = 10.0


def sampled_kl(log_prob: Tensor, log_prob_reference: Tensor, estimate: KLEstimate = "k3") -> Tensor:
    """Estimates of KL(policy || reference) from actions that the policy drew, one an action (Schulman's k1, k2, k3).

    With d = log pi_ref - log pi: k1 = -d is unbiased but of zero expected gradient as a loss; k2 = d^2 / 2 has the KL's
    expected gradient; k3 = exp(d) - d - 1 is unbiased and never negative, and is GRPO's (arXiv 2402.03300, eq. 4). Its
    expected gradient is not the KL's; times the ratio of pi to what the actions were drawn from, it is (DeepSeek-V3.2,
    arXiv 2512.02556). low_var_kl is k3 up to 10, as under this name in verl, so that a token which the reference finds
    e^20 times as probable does not outweigh all others; beyond it has no gradient. TRL's is k3 without a bound.

    Args:
        log_prob, log_prob_reference: of one shape.
    """
    difference = log_prob_reference - log_prob
    if estimate == "k1":
        return -difference
    if estimate == "k2":
        return 0.5 * difference**2
    difference = difference.clamp(max=LARGEST_LOG_RATIO)
    k3 = difference.exp() - difference - 1
    return k3.clamp(max=LARGEST_LOW_VAR_KL) if estimate == "low_var_kl" else k3
