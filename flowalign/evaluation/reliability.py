"""How far a judge's verdicts can be trusted: asked again, in the other order, in other words, about smaller pictures.

A verdict of sample n of prompt g in draw r is y[g, n, r] = a[g] + t[g, n] + e[g, n, r]. Groups learn from t; var(e) is
the mean square of the draws of one sample, and what single verdicts vary by in a group is var(t) + var(e). The mean
of k draws has the reliability var(t) / (var(t) + var(e) / k). Intervals draw prompts with replacement.

A judge of pairs is asked about every two samples of a prompt in both orders; its verdict on a sample is its win rate.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image, Resampling

from flowalign.errors import ConfigError
from flowalign.evaluation.statistics import Interval, redrawn, share_interval
from rewards import Reward, score
from rewards.base import Metadata, PairwiseReward, as_reward, compare
from rewards.judges.reward import Asking
from rewards.pairwise import both_orders, win_rates
from rewards.usage import usage_of

Array = NDArray[np.float64]
RELIABLE = 0.8
"""Reliability that a verdict should have."""
BINS = 5
"""Bins of the curve of calibration."""


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """What verdicts differ by when something changes that should not matter."""

    noise: Interval
    """Standard deviation in a group of one verdict, with the noise between two draws; of another wording after its
    spread is brought to the first one's."""
    beyond: Interval
    """The same without the noise between two draws; 0 at its lower end where that may be all there is."""
    shift: Interval
    """Change of the mean."""
    turned: Interval
    """Share of the pairs of a group whose order changes; a tie on one side is half a change."""


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """Verdicts against labels that are known."""

    samples: int
    good: float
    """Share of the samples whose label is 1."""
    auc: Interval
    """Chance that a good sample is above a bad one, over all prompts."""
    auc_in_groups: Interval | None
    """The same within prompts, which is what groups learn from; None where no prompt has both."""
    brier: Interval | None
    """Mean squared error of the verdicts as probabilities; None where some are outside 0 to 1."""
    curve: list[dict[str, float]]
    """Bins of the verdicts: their mean, the share of good samples with its interval, and the samples."""


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """Figures of one judge on groups of samples."""

    name: str
    prompts: int
    samples: int
    draws: int
    noise: Interval
    """Standard deviation of a verdict between draws."""
    within: Interval
    """Standard deviation of single verdicts in a group, noise included."""
    reliability: Interval
    """Share of that variance which is not noise."""
    needed: Interval
    """Draws whose mean has the reliability `RELIABLE`; infinite where the noise may be all there is."""
    disturbances: Mapping[str, Disturbance]
    prefers_first: Interval | None
    """How often a judge of pairs prefers the one that it is shown first, above one half; None of other judges."""
    labels: Labelled | None
    verdicts: int
    """Verdicts of one draw."""
    seconds: float
    """Seconds a verdict."""
    tokens: float
    """Tokens a verdict, of questions and replies; 0 of a reward that counts none."""

    def record(self) -> dict[str, Any]:
        """The figures as JSON."""
        return asdict(self)


@dataclass
class Asked:
    """Samples of a judge by prompt, and what it is asked."""

    samples: Sequence[Any]
    prompts: Sequence[str]
    metadata: Metadata
    groups: list[list[int]] = field(init=False)
    pairs: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        rows: dict[str, list[int]] = {}
        for row, prompt in enumerate(self.prompts):
            rows.setdefault(prompt, []).append(row)
        self.groups = [members for members in rows.values() if len(members) > 1]
        if len(self.groups) < 2:
            raise ConfigError("reliability takes two samples or more of two prompts or more")
        self.pairs = [pair for members in self.groups for pair in combinations(members, 2)]

    def ask(self, judge: Any, draw: int = 0, size: float = 1.0) -> tuple[Array, Array]:
        """Verdicts [N] on the samples, and of a judge of pairs those [2, P] on the pairs in both orders, else [2, 0].

        Args:
            judge: a reward of samples, or one that compares two.
            draw: number of the draw; a judge that writes replies at a temperature is given other seeds.
            size: factor of the pictures' sides.
        """
        if isinstance(judge, Asking):
            judge.draw = draw
        samples = self.samples if size == 1 else [resized(sample, size) for sample in self.samples]
        if not hasattr(judge, "compare"):
            pointwise = as_reward(judge)
            return score(pointwise, samples, self.prompts, self.metadata).value.double().numpy(), np.zeros((2, 0))
        first, second = zip(*both_orders(self.pairs), strict=True)
        one, other = ([samples[i] for i in side] for side in (first, second))
        prompts, metadata = [self.prompts[i] for i in first], [self.metadata[i] for i in first]
        there, back = compare(judge, one, other, prompts, metadata).value.double().numpy().reshape(2, -1)
        return self.rates((there + 1 - back) / 2), np.stack([there, back])

    def rates(self, shares: Array) -> Array:
        """Win rates [N] by the first's shares [P] of the wins."""
        return win_rates(len(self.samples), self.pairs, shares.tolist()).double().numpy()


def measure(
    judge: Reward | PairwiseReward,
    samples: Sequence[Any],
    prompts: Sequence[str],
    metadata: Metadata,
    draws: int = 3,
    sizes: Sequence[float] = (0.5,),
    wordings: Mapping[str, Reward | PairwiseReward] | None = None,
    labels: Sequence[bool] | None = None,
) -> Reliability:
    """Ask a judge again and again about the same samples.

    Args:
        judge: a reward of samples, or one that compares two.
        samples, prompts, metadata: [N]; a group is the samples of one prompt, at least two of at least two prompts.
        draws: times that it is asked the same, at least 2.
        sizes: factors of the pictures' sides that it is also asked at; none for texts and videos.
        wordings: the judge with other templates, by name.
        labels: [N] which samples are good.

    Raises:
        ConfigError: there are no two groups.
    """
    asked, usage = Asked(samples, prompts, metadata), usage_of(judge.name)
    usage.take()
    begin = time.perf_counter()
    answers = [asked.ask(judge, draw) for draw in range(draws)]
    seconds, used = time.perf_counter() - begin, usage.take()
    values, orders = np.stack([value for value, _ in answers]), answers[0][1]
    verdicts = orders.size or values.shape[1]
    groups = [values[:, members] for members in asked.groups]
    draws_of = np.array([_between_draws(group) for group in groups])
    disturbances = _wordings_and_sizes(asked, judge, values[0], draws_of, wordings or {}, sizes)
    if orders.size:
        in_order = disturbed(asked, asked.rates(orders[0]), asked.rates(1 - orders[1]), draws_of)
        disturbances = {"order": in_order} | disturbances
    noise, within = (np.array([square(group) for group in groups]) for square in (_between_draws, _between_samples))

    def variances(draw: Array) -> tuple[Array, Array]:
        return tuple(draw @ each[:, 0] / (draw @ each[:, 1]) for each in (noise, within))

    def of(statistic: Callable[[Array, Array], Array]) -> Interval:
        return _interval(lambda draw: statistic(*variances(draw)), len(groups))

    return Reliability(
        name=judge.name,
        prompts=len(groups),
        samples=len(samples),
        draws=draws,
        noise=of(lambda e, _: np.sqrt(e)),
        within=of(lambda _, y: np.sqrt(y)),
        reliability=of(_reliability),
        needed=of(_needed),
        disturbances=disturbances,
        prefers_first=_prefers_first(asked, orders) if orders.size else None,
        labels=None if labels is None else labelled(asked, values.mean(0), np.array(labels, dtype=float)),
        verdicts=verdicts,
        seconds=seconds / draws / verdicts,
        tokens=(used["question_tokens"] + used["reply_tokens"]) / draws / verdicts,
    )


def _wordings_and_sizes(
    asked: Asked,
    judge: Reward | PairwiseReward,
    values: Array,
    draws: Array,
    wordings: Mapping[str, Reward | PairwiseReward],
    sizes: Sequence[float],
) -> dict[str, Disturbance]:
    """What the verdicts [N] change by with other templates, and at other sizes."""
    disturbances = {
        f"wording {name}": disturbed(asked, values, asked.ask(other)[0], draws, rescale=True)
        for name, other in wordings.items()
    }
    for size in sizes:
        disturbances[f"size {size:g}"] = disturbed(asked, values, asked.ask(judge, size=size)[0], draws)
    return disturbances


def resized(sample: object, factor: float) -> Any:
    """A picture with sides of this factor.

    Raises:
        ConfigError: it is a text or a video.
    """
    if not isinstance(sample, Image):
        raise ConfigError("--size is of pictures, and these samples are texts or videos; --size 1 leaves it out")
    sides = [max(1, round(side * factor)) for side in sample.size]
    return sample.convert("RGB").resize((sides[0], sides[1]), Resampling.BICUBIC)


def disturbed(asked: Asked, before: Array, after: Array, draws: Array, rescale: bool = False) -> Disturbance:
    """What verdicts [N] became other verdicts [N] by.

    Args:
        draws: [groups, 2] sums of squares between draws that are asked the same, and their degrees of freedom.
    """
    rows = []
    spread = [
        math.sqrt(np.mean([np.var(values[members], ddof=1) for members in asked.groups])) for values in (before, after)
    ]
    factor = spread[0] / spread[1] if rescale and spread[1] > 0 else 1.0
    for members in asked.groups:
        one, other = before[members], after[members]
        difference = factor * other - one
        left, right = np.triu_indices(len(members), 1)
        turned = abs(np.sign(one[left] - one[right]) - np.sign(other[left] - other[right])) / 2
        squares = ((difference - difference.mean()) ** 2).sum() / 2
        rows.append((squares, len(members) - 1, (other - one).sum(), len(members), turned.sum(), len(turned)))
    table = np.concatenate([np.array(rows), draws], axis=1)

    def share(draw: Array, column: int) -> Array:
        ratio: Array = draw @ table[:, column] / (draw @ table[:, column + 1])
        return ratio

    count = len(asked.groups)
    return Disturbance(
        noise=_interval(lambda draw: np.sqrt(share(draw, 0)), count),
        beyond=_interval(lambda draw: np.sqrt(np.maximum(share(draw, 0) - share(draw, 6), 0)), count),
        shift=_interval(lambda draw: share(draw, 2), count),
        turned=_interval(lambda draw: share(draw, 4), count),
    )


def labelled(asked: Asked, values: Array, labels: Array) -> Labelled:
    """Verdicts [N] against labels [N] of 0 and 1.

    Raises:
        ConfigError: all labels are the same.
    """
    if labels.min() == labels.max():
        raise ConfigError(f"labels are all {'good' if labels.all() else 'bad'}; reliability takes some of either")
    # [groups, groups] wins of a group's good samples over another one's bad samples, and how many meetings there are
    wins, met = np.zeros((2, len(asked.groups), len(asked.groups)))
    for g, mine in enumerate(asked.groups):
        good = values[[row for row in mine if labels[row] == 1], None]
        for h, others in enumerate(asked.groups):
            bad = values[[row for row in others if labels[row] == 0]]
            wins[g, h], met[g, h] = ((good > bad) + (good == bad) / 2).sum(), good.size * bad.size

    def auc(draw: Array) -> Array:
        return np.einsum("dg,gh,dh->d", draw, wins, draw) / np.einsum("dg,gh,dh->d", draw, met, draw)

    def auc_in_groups(draw: Array) -> Array:
        return draw @ wins.diagonal() / (draw @ met.diagonal())

    errors = np.array([((values[members] - labels[members]) ** 2).sum() for members in asked.groups])
    sizes, count = np.array([len(members) for members in asked.groups]), len(asked.groups)
    chances = bool(values.min() >= 0 and values.max() <= 1)
    return Labelled(
        samples=len(values),
        good=float(labels.mean()),
        auc=_interval(auc, count),
        auc_in_groups=_interval(auc_in_groups, count) if met.diagonal().any() else None,
        brier=_interval(lambda draw: draw @ errors / (draw @ sizes), count) if chances else None,
        curve=_curve(values, labels) if chances else [],
    )


def _curve(values: Array, labels: Array) -> list[dict[str, float]]:
    """Bins of equal width of the verdicts, against the share of good samples in each."""
    bins, curve = np.minimum((values * BINS).astype(int), BINS - 1), []
    for each in np.unique(bins):
        inside = bins == each
        low, high = share_interval(float(labels[inside].mean()), int(inside.sum()))
        good = {"good": float(labels[inside].mean()), "low": low, "high": high}
        curve.append({"mean": float(values[inside].mean()), **good, "samples": int(inside.sum())})
    return curve


def _prefers_first(asked: Asked, orders: Array) -> Interval:
    """Mean share of the first place beyond one half, over pairs asked in both orders."""
    size = [len(members) * (len(members) - 1) // 2 for members in asked.groups]
    sums = np.array([part.sum() for part in np.split(orders.mean(0) - 0.5, np.cumsum(size)[:-1])])
    return _interval(lambda draw: draw @ sums / (draw @ np.array(size)), len(size))


def _between_draws(group: Array) -> tuple[float, int]:
    """Sum of squares of a group [draws, members] between draws of one sample, and its degrees of freedom."""
    return float(((group - group.mean(0)) ** 2).sum()), group.shape[1] * (group.shape[0] - 1)


def _between_samples(group: Array) -> tuple[float, int]:
    """Sum of squares of single verdicts of a group [draws, members] between samples, and its degrees of freedom."""
    return float(((group - group.mean(1, keepdims=True)) ** 2).sum()), group.shape[0] * (group.shape[1] - 1)


def _needed(noise: Array, within: Array) -> Array:
    """Draws whose mean is reliable, by variances between draws and between samples."""
    draws = np.ceil(_odds(1 - _reliability(noise, within)) * RELIABLE / (1 - RELIABLE) - 1e-9)
    return np.asarray(np.maximum(1, draws))


def _reliability(noise: Array, within: Array) -> Array:
    """Share of the variance in a group that is not noise; 0 where nothing varies."""
    share = np.divide(noise, within, out=np.ones_like(noise), where=within > 0)
    return np.asarray(1 - np.minimum(share, 1))


def _odds(share: Array) -> Array:
    return np.divide(share, 1 - share, out=np.full_like(share, np.inf), where=share < 1)


def _interval(statistic: Callable[[Array], Array], count: int) -> Interval:
    """A statistic of `count` groups, and its 95% bootstrap interval; of draws [D, count] it gives [D]."""
    with np.errstate(invalid="ignore", divide="ignore"):
        value = float(statistic(np.ones((1, count)))[0])
        drawn = statistic(redrawn(count))
    # a draw without any pair to look at says nothing; by order, since infinite values have no mean
    low, high = np.quantile(drawn[~np.isnan(drawn)], (0.025, 0.975), method="nearest").tolist()
    return Interval(value, low, high)
