"""Rewards of pictures on videos."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from PIL.Image import Image
from torch import Tensor

from rewards.base import Around, Metadata, Reward, Scores, as_reward, score, spec_of


class PerFrame(Around):
    """A reward of pictures on videos: the mean over frames.

    Args:
        frames: how many, taken evenly from the first to the last.
    """

    def __init__(self, reward: Reward, frames: int = 8) -> None:
        self.reward, self.frames = as_reward(reward), frames
        self.name = f"per_frame({self.reward.name})"
        inner = spec_of(self.reward)
        self.spec = replace(inner, needs=inner.needs - {"image", "text"} | {"frames"}, differentiable=False)

    def __call__(self, samples: Sequence[Sequence[Image]], prompts: Sequence[str], metadata: Metadata) -> Scores:
        picks = [np.linspace(0, len(video) - 1, self.frames).round().astype(int) for video in samples]
        pictures = [video[i] for video, own in zip(samples, picks, strict=True) for i in own]
        owners = [i for i in range(len(samples)) for _ in range(self.frames)]
        scores = score(self.reward, pictures, [prompts[i] for i in owners], [metadata[i] for i in owners])

        def mean(values: Tensor) -> Tensor:
            return values.unflatten(0, (-1, self.frames)).mean(dim=1)

        weight = None if scores.weight is None else mean(scores.weight)
        return Scores(mean(scores.value), {name: mean(part) for name, part in scores.parts.items()}, None, weight)
