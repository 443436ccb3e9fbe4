"""How much each reward of a weighted sum decides, and the weights that give each one the share asked for.

Groups learn from a = sum over k of w_k (r_k - its mean in the group). The share of reward k is cov(w_k r_k, a) / var(a)
within groups: the shares add up to 1, and a share below 0 belongs to a reward that the others outvote.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import kurtosis

from flowalign.data import Prompts
from flowalign.errors import ConfigError
from flowalign.evaluation.scores import evaluate
from flowalign.evaluation.statistics import Interval, redrawn
from flowalign.policies.base import Policy
from flowalign.policies.settings import SamplingSettings
from rewards import Reward, WeightedSum

Array = NDArray[np.float64]
SWEEPS = 500
"""Rounds of coordinate descent; it converges in tens."""


@dataclass(frozen=True, kw_only=True)
class RewardScale:
    """Figures of one reward over groups of samples."""

    mean: float
    low: float
    """1% quantile of the values."""
    high: float
    """99% quantile of the values."""
    between: float
    """Standard deviation of the groups' means."""
    within: float
    """Standard deviation in a group, which is what a group learns from."""
    bounded: bool
    """Whether all values are in [0, 1]."""
    tail: float
    """Excess kurtosis in the groups: 0 of a normal distribution, 3 and more where few samples decide."""
    dead: float
    """Share of the groups in which all values are equal."""
    weight: float
    share: Interval
    """Share of the variance of the weighted sum within groups."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Rewards of a weighted sum on the same groups of samples."""

    scales: Mapping[str, RewardScale]
    correlation: Array
    """[K, K] correlations within groups; 0 with a reward that is constant there."""
    ends: Array
    """[2, K, K] ends of their 95% intervals over prompts."""
    covariance: Array
    """[K, K] covariances within groups."""

    def weights(self, shares: Mapping[str, float]) -> dict[str, float]:
        """Weights that give these shares of the variance; their sizes add up to 1, their signs are today's.

        Args:
            shares: above 0, of each reward; they are divided by their sum.

        Raises:
            ConfigError: a reward is without a share, or has no spread.
        """
        scales = list(self.scales.values())
        if set(shares) != set(self.scales):
            raise ConfigError(f"shares are of {', '.join(self.scales)}; give each one (got {', '.join(shares)})")
        for name, scale in self.scales.items():
            if scale.within == 0:
                raise ConfigError(f"'{name}' is the same for all samples of a prompt: no weight gives it a share")
        signs = np.array([-1.0 if scale.weight < 0 else 1.0 for scale in scales])
        asked = np.array([shares[name] for name in self.scales])
        weights = signs * weights_for(self.covariance * np.outer(signs, signs), asked / asked.sum())
        return dict(zip(self.scales, (weights / abs(weights).sum()).tolist(), strict=True))

    def record(self) -> dict[str, Any]:
        """The figures as JSON."""
        scales = {name: vars(scale) | {"share": vars(scale.share)} for name, scale in self.scales.items()}
        return {"rewards": scales, "correlation": self.correlation.tolist()} | {"correlation_ends": self.ends.tolist()}


def calibrate(
    policy: Policy[Any],
    rewards: Sequence[Reward],
    weights: Sequence[float],
    prompts: Prompts,
    sampling: SamplingSettings,
    group_size: int = 8,
    seed: int = 0,
) -> Calibration:
    """Sample each prompt `group_size` times, and measure what each reward of the weighted sum decides.

    Raises:
        ConfigError: fewer than two rewards, prompts or samples of a prompt.
    """
    if min(len(rewards), len(prompts), group_size) < 2:
        raise ConfigError("a calibration takes two rewards or more, and two samples or more of two prompts or more")
    total = WeightedSum(rewards, weights)
    result = evaluate(policy, total, prompts, sampling, group_size, seed)
    return figures({label: result.parts[label] for label in total.labels}, total.weights, group_size)


def figures(values: Mapping[str, Sequence[float]], weights: Sequence[float], group_size: int) -> Calibration:
    """Calibration of rewards on samples that stand group by group.

    Args:
        values: of each reward, [groups * group_size].
        weights: one a reward.
        group_size: samples of a prompt, at least 2.
    """
    table = np.array(list(values.values()), dtype=np.float64).reshape(len(values), -1, group_size)
    centred = table - table.mean(axis=2, keepdims=True)
    products = np.einsum("kgn,lgn->gkl", centred, centred) / (group_size - 1)
    covariance = products.mean(axis=0)
    scale = np.array(weights, dtype=np.float64)
    drawn = np.tensordot(redrawn(len(products)) / len(products), products, axes=1)
    low, high = np.nanquantile(shares_of(drawn, scale), (0.025, 0.975), axis=0).tolist()
    shares = shares_of(covariance, scale).tolist()
    within = np.sqrt(np.diag(covariance))
    scales = {}
    for k, name in enumerate(values):
        spread = np.ptp(table[k], axis=1)
        ends = np.quantile(table[k], (0.01, 0.99)).tolist()
        scales[name] = RewardScale(
            mean=float(table[k].mean()),
            low=ends[0],
            high=ends[1],
            between=float(table[k].mean(axis=1).std(ddof=1)),
            within=float(within[k]),
            bounded=bool(table[k].min() >= 0 and table[k].max() <= 1),
            tail=float(kurtosis(centred[k], axis=None)) if within[k] else 0.0,
            dead=float((spread == 0).mean()),
            weight=float(scale[k]),
            share=Interval(shares[k], low[k], high[k]),
        )
    ends = np.quantile(correlations(drawn), (0.025, 0.975), axis=0)
    return Calibration(scales=scales, correlation=correlations(covariance), ends=ends, covariance=covariance)


def correlations(covariance: Array) -> Array:
    """[..., K, K] correlations of covariances; 0 with what does not vary."""
    deviation = np.sqrt(np.diagonal(covariance, axis1=-2, axis2=-1))
    sizes = deviation[..., :, None] * deviation[..., None, :]
    return np.divide(covariance, sizes, out=np.zeros_like(covariance), where=sizes > 0)


def shares_of(covariance: Array, weights: Array) -> Array:
    """[..., K] shares w_k (C w)_k / w'Cw of covariances [..., K, K]; NaN where nothing varies."""
    parts = weights * (covariance @ weights)
    whole = parts.sum(axis=-1, keepdims=True)
    return np.divide(parts, whole, out=np.full_like(parts, np.nan), where=whole > 0)


def weights_for(covariance: Array, shares: Array) -> Array:
    """[K] the positive weights with w_k (C w)_k = s_k, the only ones for a positive definite C [K, K] and s > 0.

    They are the minimum of w'Cw / 2 - sum over k of s_k log w_k, by coordinates, as portfolios of given risk shares are
    found (arXiv 1311.4057).
    """
    weights = np.sqrt(shares / np.diag(covariance))
    for _ in range(SWEEPS):
        for k in range(len(weights)):
            others = covariance[k] @ weights - covariance[k, k] * weights[k]
            weights[k] = (np.sqrt(others**2 + 4 * covariance[k, k] * shares[k]) - others) / (2 * covariance[k, k])
    return weights
