"""Rewards made of rewards. Each class is one formula over the values of its parts, which all stay visible."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rewards.base import (
    END,
    AroundSeveral,
    Kind,
    Latents,
    Metadata,
    Reward,
    RewardError,
    Scores,
    Spec,
    as_reward,
    groups,
    score,
    spec_of,
)
from rewards.gradients import score_with_gradient

_WIDTH: dict[Kind, int] = {"pointwise": 0, "group": 1, "set": 2}
_EPS = 1e-6


class Composition(AroundSeveral, ABC):
    """Base: `rewards` are scored on the same samples, and `combine` makes one value of their values.

    A part is named after its reward; where two have one name, the second gets a number. The weights of rewards that
    have any are multiplied: exp(-a) exp(-b) = exp(-(a + b)), a sample's disagreements add up.
    """

    kind: Kind = "pointwise"
    """Kind of the formula; the composition is as wide as its widest part."""

    def __init__(self, rewards: Sequence[Reward], title: str) -> None:
        if not rewards:
            raise ValueError(f"{title} of no rewards; name at least one")
        self.rewards = [as_reward(reward) for reward in rewards]
        for reward in self.rewards:
            if spec_of(reward).kind == "pairwise":
                raise ValueError(f"{title}: '{reward.name}' compares pairs; wrap it in 'win_rate'")
        self.labels = labels(self.rewards)
        self.name = f"{title}({','.join(reward.name for reward in self.rewards)})"

    @property
    def spec(self) -> Spec:
        specs = [spec_of(reward) for reward in self.rewards]
        return Spec(
            needs=frozenset().union(*(spec.needs for spec in specs)),
            kind=max([self.kind, *(spec.kind for spec in specs)], key=_WIDTH.__getitem__),
            differentiable=all(spec.differentiable for spec in specs),
            deterministic=all(spec.deterministic for spec in specs),
            scheduled=any(spec.scheduled for spec in specs),
            off_device=all(spec.off_device for spec in specs),
        )

    @abstractmethod
    def combine(self, values: Tensor, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        """[B] from the values [rewards, B] of the parts."""

    def __call__(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> Scores:
        waiting = [i for i, reward in enumerate(self.rewards) if getattr(reward, "asynchronous", False)]
        with ThreadPoolExecutor(max(1, len(waiting))) as pool:
            asked = {i: pool.submit(score, self.rewards[i], samples, prompts, metadata) for i in waiting}
            scores = {
                i: score(reward, samples, prompts, metadata) for i, reward in enumerate(self.rewards) if i not in asked
            }
            scores |= {i: answer.result() for i, answer in asked.items()}
        return self._collect([scores[i] for i in range(len(self.rewards))], prompts, metadata)

    def score_pixels(self, pixels: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """See `DifferentiableReward.score_pixels`; every part must be differentiable."""
        scores = [score_with_gradient(reward, pixels, prompts, metadata) for reward in self.rewards]
        return self._collect(scores, prompts, metadata)

    def score_latents(self, latents: Latents, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """See `LatentReward.score_latents`; every part must score latents."""
        scores = [score_with_gradient(reward, latents, prompts, metadata) for reward in self.rewards]
        return self._collect(scores, prompts, metadata)

    def _collect(self, scores: Sequence[Scores], prompts: Sequence[str], metadata: Metadata) -> Scores:
        parts = {}
        for label, each in zip(self.labels, scores, strict=True):
            value = each.value.detach()
            parts[label] = value if each.missing is None else value.masked_fill(each.missing, torch.nan)
            parts |= {f"{label}/{part}": values for part, values in each.parts.items()}
        weights = [each.weight for each in scores if each.weight is not None]
        weight = torch.stack(weights).prod(dim=0) if weights else None
        # with a gradient, each value is where its reward computes
        values = torch.stack([each.value.to(scores[0].value.device) for each in scores])
        value = self.combine(values, prompts, metadata)
        replies = joined(dict(zip(self.labels, scores, strict=True)))
        lacking = [each.missing for each in scores if each.missing is not None]
        missing = torch.stack(lacking).all(0) if len(lacking) == len(scores) else None
        return Scores(value, parts, None, weight, replies, missing)


def labels(rewards: Sequence[Reward]) -> list[str]:
    """The names of rewards; where one comes again it gets a number."""
    names = [reward.name for reward in rewards]
    return [name + (f"_{names[:i].count(name) + 1}" if name in names[:i] else "") for i, name in enumerate(names)]


def joined(scores: Mapping[str, Scores]) -> list[dict[str, str]] | None:
    """Replies of several judges about the same samples, under their labels."""
    written = {label: score.replies for label, score in scores.items() if score.replies is not None}
    if not written:
        return None
    return [
        {f"{label}/{name}": text for label, score in zip(written, row) for name, text in score.items()}
        for row in zip(*written.values(), strict=True)
    ]


class WeightedSum(Composition):
    """The weighted sum of rewards.

    Args:
        rewards: at least one.
        weights: one each; default 1.
    """

    def __init__(self, rewards: Sequence[Reward], weights: Sequence[float] | None = None) -> None:
        super().__init__(rewards, "sum")
        self.weights = one_each(weights, self.rewards)
        self.name = "+".join(reward.name for reward in self.rewards)

    def combine(self, values: Tensor, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        return torch.tensor(self.weights).to(values) @ values

    def _collect(self, scores: Sequence[Scores], prompts: Sequence[str], metadata: Metadata) -> Scores:
        total = super()._collect(scores, prompts, metadata)
        if any(score.steps is not None for score in scores):
            # a reward without steps pays at the end
            own_steps = [score.steps or [[(END, value)] for value in score.value.tolist()] for score in scores]
            total.steps = [
                sorted((end, weight * value) for weight, row in zip(self.weights, rows) for end, value in row)
                for rows in zip(*own_steps, strict=True)
            ]
        return total


class Normalized(Composition):
    """The weighted sum of rewards that were each brought to mean 0 and deviation 1 first.

    So a reward of wide range does not drown the others, and weights mean what they say.

    Args:
        rewards, weights: as of `WeightedSum`.
        over: normalise within each group, or over all samples of the call (one process's).
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        weights: Sequence[float] | None = None,
        over: Literal["group", "batch"] = "group",
    ) -> None:
        super().__init__(rewards, "normalized")
        self.weights, self.over = one_each(weights, self.rewards), over
        self.kind = "group" if over == "group" else "set"

    def combine(self, values: Tensor, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        normal = torch.zeros_like(values)
        for members in groups(prompts, metadata) if self.over == "group" else [list(range(len(prompts)))]:
            group_values = values[:, members]
            deviation = group_values.std(dim=1, correction=0, keepdim=True)
            normal[:, members] = (group_values - group_values.mean(dim=1, keepdim=True)) / (deviation + _EPS)
        return torch.tensor(self.weights).to(values) @ normal


class Product(Composition):
    """The product of rewards, for rewards in [0, 1] that must all be good."""

    def __init__(self, rewards: Sequence[Reward]) -> None:
        super().__init__(rewards, "product")

    def combine(self, values: Tensor, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        return values.prod(dim=0)


class WorstCase(Composition):
    """The lowest value of an ensemble of rewards of one scale (arXiv 2310.02743)."""

    def __init__(self, rewards: Sequence[Reward]) -> None:
        super().__init__(rewards, "worst")

    def combine(self, values: Tensor, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        return values.amin(dim=0)


class MeanMinusSpread(Composition):
    """The mean of an ensemble of rewards of one scale, less what they differ by (after arXiv 2310.02743).

    Args:
        rewards: at least two.
        coefficient: coefficient of their standard deviation (the paper takes the variance).
    """

    def __init__(self, rewards: Sequence[Reward], coefficient: float = 1.0) -> None:
        super().__init__(rewards, "mean_minus_spread")
        if len(self.rewards) < 2:
            raise ValueError("mean_minus_spread of one reward has no spread; name at least two")
        self.coefficient = coefficient

    def combine(self, values: Tensor, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        return values.mean(dim=0) - self.coefficient * values.std(dim=0, correction=0)


class Agreement(Composition):
    """Ctrl-U (arXiv 2410.11236): learn less from a sample the less its reward agrees with the others of its group.

    The value is the reward itself; the weight, by which advantages are multiplied, is exp(-disagreement). A sample's
    disagreement is the mean absolute difference between its reward and each other generation's of its condition,
    the same for both of two. It acts after normalisation within the group, which would divide a group's factor out.

    Departures: the paper weights the loss of a differentiable reward, takes the KL divergence of the reward model's
    outputs, and adds the disagreement to the loss, where its gradient makes generations alike.

    Args:
        reward: learned from, and asked for the disagreement.
        temperature: the disagreement is divided by it.
    """

    kind = "group"

    def __init__(self, reward: Reward, temperature: float = 1.0) -> None:
        super().__init__([reward], "agreement")
        self.temperature = temperature

    def combine(self, values: Tensor, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        return values[0]

    def _collect(self, scores: Sequence[Scores], prompts: Sequence[str], metadata: Metadata) -> Scores:
        total = super()._collect(scores, prompts, metadata)
        value = total.value.detach()
        weight = torch.ones_like(value)
        for members in groups(prompts, metadata):
            group_values = value[members]
            disagreement = (group_values[:, None] - group_values).abs().sum(1) / max(len(members) - 1, 1)
            weight[members] = (-disagreement / self.temperature).exp()
        total.weight = weight if total.weight is None else weight * total.weight
        return total


class Gate(Composition):
    """Pay a reward only where another passes.

    Args:
        passes: must be at least `threshold`.
        then: reward there.
        otherwise: the value elsewhere.
    """

    def __init__(self, passes: Reward, then: Reward, threshold: float = 0.5, otherwise: float = 0.0) -> None:
        super().__init__([then, passes], "gate")
        self.threshold, self.otherwise = threshold, otherwise

    def combine(self, values: Tensor, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        then, passes = values
        return torch.where(passes >= self.threshold, then, self.otherwise)


class Rescaled(Composition):
    """A reward brought from [low, high] to [0, 1].

    Args:
        clip: keep values outside at the ends.
    """

    def __init__(self, reward: Reward, low: float, high: float, clip: bool = True) -> None:
        super().__init__([reward], "rescaled")
        if not low < high:
            raise ValueError(f"rescaled: low {low} is not below high {high}")
        self.low, self.high, self.clip = low, high, clip

    def combine(self, values: Tensor, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        value = (values[0] - self.low) / (self.high - self.low)
        return value.clamp(0, 1) if self.clip else value


class JudgedBy(Composition):
    """A reward that is told a text of the metadata in the place of the prompt, e.g. what a loose request means.

    Args:
        key: key of the metadata that holds the text.
    """

    def __init__(self, reward: Reward, key: str) -> None:
        super().__init__([reward], "judged_by")
        self.key = key

    @property
    def spec(self) -> Spec:
        spec = super().spec
        return replace(spec, needs=spec.needs | {"metadata"})

    def __call__(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> Scores:
        return super().__call__(samples, self._texts(prompts, metadata), metadata)

    def score_pixels(self, pixels: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        return super().score_pixels(pixels, self._texts(prompts, metadata), metadata)

    def score_latents(self, latents: Latents, prompts: Sequence[str], metadata: Metadata) -> Scores:
        return super().score_latents(latents, self._texts(prompts, metadata), metadata)

    def _texts(self, prompts: Sequence[str], metadata: Metadata) -> list[str]:
        lacking = next((text for text, record in zip(prompts, metadata, strict=True) if self.key not in record), None)
        if lacking is not None:
            raise RewardError(f"reward '{self.name}': the metadata of the prompt {lacking!r} has no '{self.key}'")
        return [str(record[self.key]) for record in metadata]

    def combine(self, values: Tensor, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        return values[0]


class ScheduledSum(Composition):
    """A weighted sum whose weights change over training.

    Args:
        rewards: at least one.
        schedules: for each reward [progress, weight] points in order of progress in [0, 1], joined by straight
            lines; `advance` says where training is, and before the first call it is at 0.
    """

    def __init__(self, rewards: Sequence[Reward], schedules: Sequence[Sequence[tuple[float, float]]]) -> None:
        super().__init__(rewards, "scheduled")
        if len(schedules) != len(self.rewards) or not all(schedules):
            raise ValueError(f"scheduled: {len(self.rewards)} rewards need as many schedules, each of at least a point")
        self.schedules = [np.array(points, dtype=np.float64).T for points in schedules]
        if any((np.diff(progress) < 0).any() for progress, _ in self.schedules):
            raise ValueError("scheduled: the points of a schedule must be in order of progress")
        self.progress = 0.0

    @property
    def spec(self) -> Spec:
        return replace(super().spec, scheduled=True)

    def advance(self, progress: float) -> None:
        super().advance(progress)
        self.progress = progress

    @property
    def weights(self) -> list[float]:
        """Present weights of the rewards."""
        return [float(np.interp(self.progress, *points)) for points in self.schedules]

    def combine(self, values: Tensor, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        return torch.tensor(self.weights).to(values) @ values


def one_each(weights: Sequence[float] | None, rewards: Sequence[Reward]) -> list[float]:
    """The weights of rewards, 1 where none are given.

    Raises:
        ValueError: not one each.
    """
    if weights is not None and len(weights) != len(rewards):
        raise ValueError(f"{len(rewards)} rewards but {len(weights)} weights")
    return list(weights) if weights is not None else [1.0] * len(rewards)
