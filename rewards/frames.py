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
        attenuation: a frame's weight is exp(-attenuation * d), d frames of the video from its middle one, so that the
            ends may differ more from the prompt (InstructVideo, arXiv 2312.12490); 0: all weigh alike. Weights sum to
            1, where the authors' do not.
    """

    def __init__(self, reward: Reward, frames: int = 8, attenuation: float = 0.0) -> None:
        self.reward, self.frames, self.attenuation = as_reward(reward), frames, attenuation
        self.name = f"per_frame({self.reward.name})"
        if sides(spec_of(self.reward).needs) != ["picture"]:
            raise ValueError(f"per_frame: '{self.reward.name}' scores no pictures; name it without per_frame")

    @property
    def spec(self) -> Spec:
        inner = spec_of(self.reward)
        return replace(inner, needs=inner.needs - {"image", "text"} | {"frames"})

    def __call__(self, samples: Sequence[Sequence[Image]], prompts: Sequence[str], metadata: Metadata) -> Scores:
        pictures = [video[i] for video in samples for i in self._chosen(len(video))]
        owners = [i for i in range(len(samples)) for _ in range(self.frames)]
        scores = score(self.reward, pictures, [prompts[i] for i in owners], [metadata[i] for i in owners])
        return self._mean(scores, torch.stack([self.weights(len(video)) for video in samples]))

    def score_pixels(self, pixels: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """See `DifferentiableReward.score_pixels`; for videos [B, 3, F, H, W]."""
        pictures = pixels[:, :, self._chosen(pixels.shape[2])].transpose(1, 2).flatten(0, 1)
        owners = [i for i in range(len(pixels)) for _ in range(self.frames)]
        records = [metadata[i] for i in owners]
        scores = score_with_gradient(self.reward, pictures, [prompts[i] for i in owners], records)
        return self._mean(scores, self.weights(pixels.shape[2]).expand(len(pixels), -1))

    def _chosen(self, count: int) -> list[int]:
        """The frames, of so many."""
        chosen: list[int] = np.linspace(0, count - 1, self.frames).round().astype(int).tolist()
        return chosen

    def weights(self, count: int) -> Tensor:
        """[frames] weights of the chosen frames of a video of `count`."""
        distance = (torch.tensor(self._chosen(count)) - count // 2).abs()
        return (-self.attenuation * distance).softmax(0)

    def _mean(self, scores: Scores, weights: Tensor) -> Scores:
        """Mean of the frames' scores, video after video, by weights [videos, frames]."""

        def mean(values: Tensor) -> Tensor:
            return (values.unflatten(0, (-1, self.frames)) * weights.to(values)).sum(1)

        weight = None if scores.weight is None else mean(scores.weight)
        return Scores(mean(scores.value), {name: mean(column) for name, column in scores.parts.items()}, None, weight)
