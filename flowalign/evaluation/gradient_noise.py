"""How much of a gradient is signal: from the gradients of equal parts of a batch, each of other prompts.

With g_k = G + e_k of K parts, the mean of g_k . g_l over pairs k != l is unbiased for |G|^2, and the mean of |g_k|^2
less it for the noise E|e_k|^2 of a part. The noise of an update over n groups is E|e|^2 = N / n, and the n at which it
is |G|^2 is the gradient noise scale (arXiv 1812.06162, here in groups). Intervals are by the jackknife over parts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t

from flowalign.evaluation.statistics import Interval

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class GradientNoise:
    """Signal and noise of an update's gradient."""

    groups: int
    """Groups of an update."""
    norm: float
    """Norm of the mean gradient of all parts."""
    cosine: Interval
    """Cosine of the gradients of two half batches, in [-1, 1]."""
    signal: Interval
    """|G|^2 over the noise of an update, E|e|^2: 1 where they are as large; below 0 where chance made it so."""

    @property
    def scale(self) -> Interval:
        """Groups at which signal and noise are as large; an end without a number has no bound."""
        signal = self.signal
        assert signal.low is not None and signal.high is not None
        ends = [self.groups / value if value > 0 else None for value in (signal.high, signal.low)]
        return Interval(self.groups / signal.mean if signal.mean > 0 else float("inf"), ends[0], ends[1])

    def record(self) -> dict[str, Any]:
        """The figures as JSON."""
        scale = self.scale
        return {
            "groups": self.groups,
            "norm": self.norm,
            "cosine_of_halves": vars(self.cosine),
            "signal_over_noise": vars(self.signal),
            "noise_scale": {"mean": scale.mean if self.signal.mean > 0 else None, "low": scale.low, "high": scale.high},
        }


def gradient_noise(gradients: Array, groups: int, part: float) -> GradientNoise | None:
    """Signal and noise from the gradients of parts.

    Args:
        gradients: [K, D], K >= 4 and even, each the mean over `part` groups.
        groups: groups of an update.

    Returns:
        None where all gradients are 0, or there is no noise.
    """
    products = gradients @ gradients.T
    if not np.trace(products) > 0:
        return None

    def ratio(members: Array) -> float:
        gram = products[np.ix_(members, members)]
        count = len(members)
        signal = (gram.sum() - np.trace(gram)) / (count * (count - 1))
        return float(signal / (np.trace(gram) / count - signal) * groups / part)

    def halves(pairs: Array) -> float:
        first, second = gradients[2 * pairs].mean(axis=0), gradients[2 * pairs + 1].mean(axis=0)
        size = float(np.linalg.norm(first) * np.linalg.norm(second))
        return float(first @ second) / size if size else 0.0

    # what is left out is a part of each half, so that the halves stay as large as each other
    cosine = jackknife(halves, len(gradients) // 2)
    assert cosine.low is not None and cosine.high is not None
    return GradientNoise(
        groups=groups,
        norm=float(np.linalg.norm(gradients.mean(axis=0))),
        cosine=Interval(cosine.mean, max(cosine.low, -1.0), min(cosine.high, 1.0)),
        signal=jackknife(ratio, len(gradients)),
    )


def jackknife(statistic: Callable[[Any], float], count: int) -> Interval:
    """A statistic of `count` members and its 95% interval, by leaving out one after the other.

    Args:
        statistic: function of the members' numbers.
    """
    everyone = np.arange(count)
    whole = statistic(everyone)
    without = np.array([statistic(np.delete(everyone, k)) for k in everyone])
    error = float(((count - 1) / count * ((without - without.mean()) ** 2).sum()) ** 0.5)
    reach = float(t.ppf(0.975, count - 1)) * error
    return Interval(whole, whole - reach, whole + reach)


def step_gain(gradients: Array, rate: float) -> Interval:
    """How far a first step of Adam by one half of the parts lowers the loss of the other half, to first order.

    Adam's first step is -rate sign(g), so that the loss of a part falls by rate g_k . sign(mean of the other half).

    Args:
        gradients: [K, D], K >= 4.
    """
    gains = rate * gradients[1::2] @ np.sign(gradients[::2].sum(axis=0))
    reach = float(t.ppf(0.975, len(gains) - 1) * gains.std(ddof=1) / len(gains) ** 0.5)
    return Interval(float(gains.mean()), float(gains.mean()) - reach, float(gains.mean()) + reach)
