"""Warning of a run that unlearns: its reward falls, in training or on held-out prompts, at a high learning rate."""

import logging
from collections.abc import Sequence
from statistics import fmean

from flowalign.config.sections import Training
from flowalign.evaluation.scores import Evaluated
from flowalign.evaluation.statistics import estimate

logger = logging.getLogger(__name__)

WINDOW = 10
"""Number of iterations whose rewards are averaged."""
ERRORS = 5.0
"""Standard errors above which a difference counts as a fall; many, since the best of all averages is compared."""
HIGH = 0.5
"""Share of the highest learning rate so far; below it there is no warning, since the rate is falling already."""
SIGNS = {
    "gradient_norm": "the gradient's norm",
    "clip_fraction": "the share of clipped ratios",
    "kl": "the distance to the start weights",
    "error": "the matching error",
}
"""Metrics, without their engine's name, that grow in runs which unlearn."""
GREW = 2.0
"""Times that a sign has to grow from the first `WINDOW` iterations to the last ones to be named in the warning."""


class Health:
    """Follows the metrics of every iteration and every evaluation of a run, and warns once.

    Args:
        training: the configuration's section; the warning names its settings.
        keeps_best: whether the run's result has the best weights already.
        silent: give no warning, since another process of the run does.
    """

    def __init__(self, training: Training, keeps_best: bool = False, silent: bool = False) -> None:
        self.training, self.keeps_best, self.warned = training, keeps_best, silent
        self.rewards: list[float] = []
        """Mean reward of each iteration."""
        self.signs: dict[str, list[float]] = {}
        """Values of each of `SIGNS` by iteration."""
        self.rate = self.highest = 0.0
        """Current learning rate, and the highest so far."""
        self._best: tuple[int, list[int], list[float]] | None = None
        """Best evaluation so far: its iteration, and the seed and the value of each sample."""

    def see(self, iteration: int, metrics: dict[str, float]) -> None:
        """Take note of the metrics of an iteration."""
        if "reward/mean" not in metrics:
            return
        self.rate = metrics.get("learning_rate", 0.0)
        self.highest = max(self.highest, self.rate)
        self.rewards.append(metrics["reward/mean"])
        for name, value in metrics.items():
            if (sign := name.rpartition("/")[2]) in SIGNS:
                self.signs.setdefault(sign, []).append(value)
        fall = fallen(self.rewards)
        if fall is not None:
            best, now = fall
            self._warn(
                f"iteration {iteration}: the mean reward of training was {best:.3f}, and is {now:.3f} in the last "
                f"{WINDOW} iterations"
            )

    def evaluated(self, iteration: int, result: Evaluated) -> None:
        """Take note of the scores of held-out prompts."""
        mean = fmean(result.value)
        if self._best is None or mean > fmean(self._best[2]):
            self._best = iteration, result.seeds, result.value
            return
        at, seeds, values = self._best
        if seeds != result.seeds:
            # the prompts changed when the run was resumed
            return
        gain = estimate([now - then for now, then in zip(result.value, values, strict=True)], result.prompts)
        if gain is not None and gain.error is not None and gain.mean < -ERRORS * gain.error:
            best = fmean(values)
            self._warn(
                f"iteration {iteration}: the held-out reward is {mean:.3f}, and was {best:.3f} at iteration {at}"
            )

    def _warn(self, seen: str) -> None:
        if not self.warned and self.rate >= HIGH * self.highest:
            self.warned = True
            seen += "".join(f"; {SIGNS[sign]} went from {then:.2g} to {now:.2g}" for sign, then, now in self._grown())
            helps = remedies(self.training, "kl" in self.signs, self.keeps_best)
            logger.warning("%s; it may fall further, or come back. What helps: %s", seen, helps)

    def _grown(self) -> list[tuple[str, float, float]]:
        """Signs that grew, with their averages over the first `WINDOW` iterations and the last."""
        ends = [(sign, fmean(values[:WINDOW]), fmean(values[-WINDOW:])) for sign, values in self.signs.items()]
        return [(sign, then, now) for sign, then, now in ends if now > GREW * then]


def fallen(rewards: Sequence[float]) -> tuple[float, float] | None:
    """The best average of `WINDOW` neighbours and the average of the last ones, if these are worse by more than noise.

    The variance of the noise is half the mean squared difference of neighbours, which a slow trend hardly changes.

    Args:
        rewards: mean reward of each iteration.
    """
    if len(rewards) < 2 * WINDOW:
        return None
    averages = [fmean(rewards[start : start + WINDOW]) for start in range(len(rewards) - 2 * WINDOW + 1)]
    best, now = max(averages), fmean(rewards[-WINDOW:])
    variance = fmean((b - a) ** 2 for a, b in zip(rewards, rewards[1:], strict=False)) / 2
    return (best, now) if best - now > ERRORS * (2 * variance / WINDOW) ** 0.5 else None


def remedies(training: Training, measures_distance: bool = False, keeps_best: bool = False) -> str:
    """Settings that make such a run rise again, or keep its best weights.

    Args:
        training: the configuration's section.
        measures_distance: whether the distance to the start weights is among the metrics, so that it can be weighed.
        keeps_best: whether the run's result has the best weights already.
    """
    rate, prompts = training.optimizer.learning_rate, training.prompts_per_iteration
    helps = [
        f"a third of training.optimizer.learning_rate (it is {rate:g})",
        f"more training.prompts_per_iteration (they are {prompts})",
    ]
    if measures_distance:
        helps.append("a larger algorithm.kl_weight")
    if training.ema_decay is None:
        helps.append("an average of the weights (training.ema_decay: 0.97)")
    if not keeps_best:
        helps.append("the best weights kept (evaluation.every: 20, evaluation.watch.keep_best: true)")
    return ", ".join(helps)
