"""Rewards of pictures on videos."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from rewards.base import Around, Metadata, Reward, Scores, Spec, as_reward, score, sides, spec_of
from rewards.gradients import score_with_gradient


class PerFrame(Around):
    """A reward of pictures on videos: the mean over frames.

    Args:
        frames: how many, taken evenly from the first to the last.
        attenuation: a frame's weight is exp(-attenuation * d), d frames of these from their middle, so that the ends
            of a video may differ more from its prompt (InstructVideo, arXiv 2312.12490); 0: all weigh alike.
    """

    def __init__(self, reward: Reward, frames: int = 8, attenuation: float = 0.0) -> None:
        self.reward, self.frames = as_reward(reward), frames
        self.name = f"per_frame({self.reward.name})"
        if sides(spec_of(self.reward).needs) != ["picture"]:
            raise ValueError(f"per_frame: '{self.reward.name}' scores no pictures; name it without per_frame")
        self.weights = (-attenuation * (torch.arange(frames) - (frames - 1) / 2).abs()).softmax(0)

    @property
    def spec(self) -> Spec:
        inner = spec_of(self.reward)
        return replace(inner, needs=inner.needs - {"image", "text"} | {"frames"})

    def __call__(self, samples: Sequence[Sequence[Image]], prompts: Sequence[str], metadata: Metadata) -> Scores:
        pictures = [video[i] for video in samples for i in self._chosen(len(video))]
        owners = [i for i in range(len(samples)) for _ in range(self.frames)]
        return self._mean(score(self.reward, pictures, [prompts[i] for i in owners], [metadata[i] for i in owners]))

    def score_pixels(self, pixels: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """See `DifferentiableReward.score_pixels`; for videos [B, 3, F, H, W]."""
        pictures = pixels[:, :, self._chosen(pixels.shape[2])].transpose(1, 2).flatten(0, 1)
        owners = [i for i in range(len(pixels)) for _ in range(self.frames)]
        records = [metadata[i] for i in owners]
        return self._mean(score_with_gradient(self.reward, pictures, [prompts[i] for i in owners], records))

    def _chosen(self, count: int) -> list[int]:
        """The frames, of so many."""
        chosen: list[int] = np.linspace(0, count - 1, self.frames).round().astype(int).tolist()
        return chosen

    def _mean(self, scores: Scores) -> Scores:
        """Mean of the frames' scores, video after video."""

        def mean(values: Tensor) -> Tensor:
            return values.unflatten(0, (-1, self.frames)) @ self.weights.to(values)

        weight = None if scores.weight is None else mean(scores.weight)
        return Scores(mean(scores.value), {name: mean(column) for name, column in scores.parts.items()}, None, weight)
