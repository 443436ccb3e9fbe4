"""Matching on pictures or videos of the data.

A group is a line of the data, its picture or its pair; its members are noise levels, drawn together
(`training.group_size`). Only previews and the evaluation sample and score pictures.

Departure from what most authors do: a picture's latents are the mean of the VAE's posterior, not a draw from it.
"""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from diffusers.utils import load_video
from pydantic import Field
from torch import Generator, Tensor

from flowalign.algorithms.matching import base
from flowalign.config import Config, Data, Named
from flowalign.data import Prompts, Targets
from flowalign.data.batches import Batch
from flowalign.data.files import CLIPS, is_clip
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import DiffusersPolicy, Rollout
from flowalign.policies.diffusion.storage import makes_videos
from flowalign.rollouts.pictures import DiffusionSampler
from flowalign.rollouts.processes import Processes
from flowalign.rollouts.sampler import Sampled
from flowalign.runs.samples import Picture
from rewards.pictures import read_frames, read_picture
from samplers import derive_seed


def opened(file: str) -> Picture:
    """A picture, or a video as a list of its frames."""
    if Path(file).suffix.lower() == ".webp" and is_clip(file):
        return read_frames(file)
    if Path(file).suffix.lower() in CLIPS:
        try:
            return [frame.convert("RGB") for frame in load_video(file)]
        except ImportError as error:
            raise ConfigError(f"{file}: to read videos, pip install imageio imageio-ffmpeg") from error
    return read_picture(file)


class FileSettings(base.MatchingSettings):
    """Settings of all methods that learn from files."""

    levels: Named = Named(name="uniform")
    """Name in `flowalign list levels`, with its settings but their number, which is `training.group_size`."""
    levels_of: Literal["group"] = "group"
    noise_of: Literal["sample"] = "sample"
    empty_prompts: float = Field(0.0, ge=0, lt=1)
    """Share of the samples that are learned without their prompt, for classifier-free guidance."""


def check_files(prompts: Prompts, name: str) -> None:
    """Refuse pictures where a pipeline of this class makes videos, or the other way round."""
    output, given = ("videos", "a picture") if makes_videos(name) else ("pictures", "a video")
    for file in prompts.files:
        if is_clip(file) != makes_videos(name):
            raise ConfigError(f"data.prompts: {name} makes {output}, and {file} is {given}")


def size(sampler: DiffusionSampler, batch: Batch) -> dict[str, Any]:
    """Size of the samples and of a network's batch, as arguments of the policy's methods."""
    sampling = sampler.arguments(batch)
    names = ("height", "width", "num_frames", "duration", "batch_size")
    return {name: sampling[name] for name in names if name in sampling}


def latents(sampler: DiffusionSampler, batch: Batch, key: str) -> Tensor:
    """[B, ...] latents of the files under a key of the metadata, brought to the size of the rollout."""
    files = [record[key] for record in batch.metadata]
    distinct = list(dict.fromkeys(files))
    encoded = sampler.policy.encode([opened(file) for file in distinct], **size(sampler, batch))
    return encoded[[distinct.index(file) for file in files]]


SampledFiles = Sampled[DiffusionSampler, Rollout | None]


class FileMatching(base.Matching[Rollout | None, None]):
    """Base of the methods that learn from files."""

    Settings = FileSettings
    settings: FileSettings
    combines = base.Matching.combines - {"overlap", "store", "whole"}
    data: ClassVar[type[Prompts]] = Targets

    def read(self, data: Data) -> Prompts:
        return self.data.of(data)

    def check_pipeline(self, config: Config, name: str) -> None:
        check_files(self.read(config.data), name)

    def check(self, config: Config) -> None:
        if "count" in self.settings.levels.settings:
            raise ConfigError("algorithm.levels.count: a line of the data has training.group_size levels; set that")
        super().check(config)

    def level_count(self, config: Config) -> int:
        return len(self.draw_levels(config.rollout.steps, Generator(), count=config.training.group_size))

    def items(self, config: Config) -> int:
        return config.training.group_size

    def learned(self, sampler: DiffusionSampler, batch: Batch, x0: Sequence[Tensor]) -> base.MatchingExperience:
        """Clean samples to learn from, one or several of each row of the batch, which share its noise and level.

        Args:
            x0: [B, ...] latents each.

        Returns:
            the samples of the first, then the second's, ...; the items are numbered by the first.
        """
        whole = Batch.cat([self.prompted(batch)] * len(x0))
        clean, guided, level_index = self.clean(sampler, whole, torch.cat(list(x0)))
        nothing = torch.zeros(len(whole), device=sampler.device)
        group = torch.tensor(whole.group, device=sampler.device)
        items = self.item_numbers(batch, level_index.shape[1], sampler.device)
        return base.MatchingExperience(
            batch=batch,
            metrics={},
            items=items,
            clean=clean,
            level_index=level_index,
            noise_seeds=whole.noise_seeds,
            advantage=nothing,
            reward=nothing,
            group=group,
            guided=guided,
        )

    def prompted(self, batch: Batch) -> Batch:
        """The batch without some of its prompts."""
        share = self.settings.empty_prompts
        seeds = [derive_seed(seed, 7) for seed in batch.noise_seeds] if share else []
        empty = [float(torch.rand((), generator=Generator().manual_seed(seed))) < share for seed in seeds]
        whole = batch[:]
        whole.prompts = ["" if left else text for left, text in zip(empty, batch.prompts)] if share else batch.prompts
        return whole

    def drawn_levels(self, sampler: DiffusionSampler, batch: Batch) -> Tensor:
        """[B, 1] of every line's levels one for each of its members."""
        steps, members = sampler.config.rollout.steps, sampler.config.training.group_size
        first = {group: row for row, group in reversed(list(enumerate(batch.group)))}
        drawn = {
            group: self.draw_levels(steps, self._generator(sampler, batch, row), count=members)
            for group, row in first.items()
        }
        levels = torch.cat([drawn[group] for group in dict.fromkeys(batch.group)])
        return levels.repeat(len(batch) // len(levels))[:, None]

    def rollout(self, sampler: DiffusionSampler, batch: Batch) -> tuple[Rollout | None, Batch]:
        """The data's samples stand for themselves; in the first iteration a short rollout to verify replay by."""
        if batch.iteration > 0:
            return None, batch
        few = batch[:4]
        call = {"steps": 2, "metadata": few.metadata, **size(sampler, few)}
        return sampler.policy.sample(few.prompts, few.seeds, **call), batch

    def decode(self, sampler: DiffusionSampler, rollout: Rollout | None) -> None:
        """Nothing is scored."""

    def record(self, sampled: SampledFiles, processes: Processes) -> None:
        """There is none."""

    def experience(self, sampled: SampledFiles, record: None, processes: Processes) -> base.MatchingExperience:
        experience = self.lessons(sampled, processes)
        # a method that learns from its own samples too has them already
        experience.rollout = experience.rollout or sampled.rollout
        return experience

    @abstractmethod
    def lessons(self, sampled: SampledFiles, processes: Processes) -> base.MatchingExperience:
        """Samples to learn from in these lines of the data."""

    def verify(self, policy: DiffusersPolicy, experience: base.MatchingExperience) -> None:
        assert experience.rollout is not None
        policy.verify(experience.rollout)
