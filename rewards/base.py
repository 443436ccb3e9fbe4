"""What a reward is: a batch of samples in, one value a sample and named parts out."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from PIL.Image import Image
from torch import Tensor


@dataclass
class Scores:
    """Scores of B samples."""

    value: Tensor
    """[B] float32: what is trained on"""
    parts: dict[str, Tensor] = field(default_factory=dict)
    """named [B] float32 values for the metrics and the gallery"""


class Reward(Protocol):
    """A pointwise reward. Any function (images, prompts) -> list of floats becomes one with `as_reward`."""

    name: str

    def __call__(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Scores: ...


class RewardError(Exception):
    """A reward returned something that cannot be learned from; the message names the reward and the prompt."""


class FunctionReward:
    """A plain function as a reward.

    Args:
        function: (images, prompts) -> one float a picture; a third parameter, if it has one, gets the metadata.
        name: for metrics and messages; default the function's own.
    """

    def __init__(self, function: Callable[..., Sequence[float]], name: str | None = None) -> None:
        self.function = function
        self.name = name or getattr(function, "__name__", type(function).__name__)
        self.takes_metadata = len(inspect.signature(function).parameters) > 2

    def __call__(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Scores:
        values = self.function(images, prompts, *([metadata] if self.takes_metadata else []))
        return Scores(torch.as_tensor(values, dtype=torch.float32).cpu())


class WeightedSum:
    """The weighted sum of rewards; every part stays visible under its reward's name."""

    def __init__(self, rewards: Sequence[Reward], weights: Sequence[float]) -> None:
        self.rewards, self.weights = list(rewards), list(weights)
        self.name = "+".join(reward.name for reward in self.rewards)

    def __call__(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Scores:
        value, parts = torch.zeros(len(images)), {}
        for reward, weight in zip(self.rewards, self.weights, strict=True):
            scores = score(reward, images, prompts, metadata)
            value = value + weight * scores.value
            parts[reward.name] = scores.value
            parts |= {f"{reward.name}/{part}": values for part, values in scores.parts.items()}
        return Scores(value, parts)


def as_reward(reward: Reward | Callable[..., Sequence[float]]) -> Reward:
    """A reward as it is, a plain function wrapped."""
    if isinstance(getattr(reward, "name", None), str):
        return cast(Reward, reward)
    return FunctionReward(cast(Callable[..., Sequence[float]], reward))


def score(
    reward: Reward, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> Scores:
    """Call a reward and check its answer.

    Raises:
        RewardError: a wrong number of values, NaN or infinity; names the reward and the prompt.
    """
    scores = reward(images, prompts, metadata)
    if scores.value.shape != (len(images),):
        raise RewardError(
            f"reward '{reward.name}' returned {scores.value.numel()} values for {len(images)} pictures "
            f"(first prompt: {prompts[0]!r})"
        )
    for value, prompt in zip(scores.value.tolist(), prompts, strict=True):
        if not math.isfinite(value):
            raise RewardError(f"reward '{reward.name}' returned {value} for the prompt {prompt!r}")
    return scores
