"""The forward process: clean samples noised to any level, for algorithms that do not ask how samples were made.

clean = ForwardProcess(policy).of(prompts, x0, levels, seeds)
noised = clean.noised(samples, places, noise_seeds)
error = noised.error(policy.velocity_of(clean, noised))
"""

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from flowalign.errors import ConfigError
from flowalign.policies.diffusion.conditions import Conditions, Ragged
from flowalign.policies.diffusion.scheduler import LevelScheduler
from flowalign.policies.diffusion.storage import makes_videos
from samplers import ode
from samplers.noise import generators, normal
from samplers.rows import SHARED, Rows


@dataclass
class Noised(Rows):
    """N clean samples, each noised to a level: x = (1 - sigma) * x0 + sigma * noise."""

    x0: Tensor
    """[N, ...] clean samples."""
    noise: Tensor
    """[N, ...] noise."""
    sigma: Tensor
    """[N] noise levels."""
    samples: Tensor
    """[N] number of each one's clean sample."""
    level_index: Tensor
    """[N] the number of each one's level."""
    error_weight: Tensor
    """[N] factor from a squared error of the velocity to one of the network's own prediction."""
    state: Tensor | None = None
    """[N] numbers of the states that they are at; equal ones are one state. None: each has its own."""

    @property
    def s(self) -> Tensor:
        """[N, 1, ...] sigma, against elements."""
        return self.sigma.view(-1, *[1] * (self.x0.dim() - 1))

    @property
    def x(self) -> Tensor:
        """[N, ...] the noised samples."""
        return (1 - self.s) * self.x0 + self.s * self.noise

    @property
    def velocity(self) -> Tensor:
        """[N, ...] the velocity that the network should predict."""
        return self.noise - self.x0

    def clean(self, velocity: Tensor) -> Tensor:
        """[N, ...] the clean samples that velocities point to."""
        return self.x - self.s * velocity

    def error(self, velocity: Tensor, target: Tensor | None = None) -> Tensor:
        """[N] squared errors of what the network predicts, the mean over elements: e(v).

        Args:
            target: [N, ...] the velocity wanted, default `velocity`.
        """
        target = self.velocity if target is None else target
        return self.error_weight * (velocity.float() - target).square().flatten(1).mean(1)


@dataclass(kw_only=True)
class CleanSamples(Rows):
    """B clean samples and what the denoiser is called with for them at each of K noise levels."""

    x0: Tensor
    """[B, ...] float32"""
    conditions: Conditions | Ragged
    sigmas: Tensor = field(metadata=SHARED)
    """[K] the levels, falling"""
    guidance: tuple[float, ...]
    error_weights: Tensor = field(metadata=SHARED)
    """[K] factors as in `Noised.error_weight`."""
    sound: Tensor | None = None
    """[B, tokens, C] float32 clean sounds, as the denoiser has them, where they are noised too"""

    def noised(self, samples: Tensor, level_index: Tensor, noise_seeds: Sequence[int]) -> Noised:
        """These samples, [N] indices, at these levels, [N] numbers of them, each with noise of its own seed."""
        # on the CPU, like the noise of rollouts, so that it is the same on every device
        noise = normal(self.x0.shape[1:], generators(noise_seeds), self.x0.device)
        return self.noised_by(samples, level_index, noise)

    def noised_sound(self, noised: Noised, noise_seeds: Sequence[int]) -> Noised:
        """The sounds of the same samples at the same levels, each with noise of its own seed."""
        assert self.sound is not None
        noise = normal(self.sound.shape[1:], generators(noise_seeds), self.sound.device)
        return Noised(
            self.sound[noised.samples],
            noise,
            noised.sigma,
            noised.samples,
            noised.level_index,
            torch.ones_like(noised.sigma),
        )

    def at_states(self, samples: Tensor, steps: Tensor, x: Tensor, velocity: Tensor) -> Noised:
        """States [N, ...] of trajectories as noised samples: of the x0 and the noise that velocities there point to."""
        s = self.sigmas[steps].view(-1, *[1] * (x.dim() - 1))
        weights = self.error_weights[steps]
        return Noised(x - s * velocity, x + (1 - s) * velocity, self.sigmas[steps], samples, steps, weights)

    def noised_by(self, samples: Tensor, level_index: Tensor, noise: Tensor) -> Noised:
        """These samples at these levels by given noise, [N, ...]."""
        sigma, error_weight = self.sigmas[level_index], self.error_weights[level_index]
        return Noised(self.x0[samples], noise, sigma, samples, level_index, error_weight)

    def noise_of(self, samples: Tensor, level_index: Tensor, x: Tensor) -> Tensor:
        """[N, ...] the noise that takes these samples to states [N, ...] at these levels."""
        s = self.sigmas[level_index].view(-1, *[1] * (x.dim() - 1))
        return (x - (1 - s) * self.x0[samples]) / s


class ForwardProcess:
    """Forward process of a pipeline: its levels, and its denoiser's arguments at them.

    Args:
        policy: the `DiffusersPolicy`.
    """

    def __init__(self, policy: Any) -> None:
        self.policy, self.pipeline, self.family = policy, policy.pipeline, policy.family

    @torch.no_grad()
    def of(
        self,
        prompts: Sequence[str],
        x0: Tensor,
        seeds: Sequence[int],
        levels: Tensor | None = None,
        steps: int | None = None,
        guidance: float | tuple[float, ...] = 1.0,
        negative_prompt: str = "",
        metadata: Sequence[Mapping[str, Any]] = (),
        sound: Tensor | None = None,
        batch_size: int = 64,
        **call: Any,
    ) -> CleanSamples:
        """Clean samples with their conditions at noise levels.

        The pipeline's own call says what its denoiser is called with, without the network being run.

        Args:
            prompts: B prompts.
            x0: [B, ...] clean latents, of a rollout or of `encoded` pictures.
            seeds: B seeds; families that draw from the VAE's posterior of a source picture need the rollout's.
            levels: [K] in (0, 1], falling, before the pipeline's own shift, which then applies to them.
            steps: in their place the levels of a rollout with so many steps.
            guidance: classifier-free scale of the velocities; 1 does without.
            metadata: metadata of the prompts, as in `DiffusersPolicy.sample`.
            sound: latents of the samples' sounds, as a rollout has them, where the network denoises both.
            call: further arguments of the pipeline's call (height, width, ...).
        """
        assert (levels is None) != (steps is None), "levels or the number of steps"
        heard = self._heard(sound)
        scales = guidance if isinstance(guidance, tuple) else (guidance,)
        sources = self.family.sources_of(self.pipeline, metadata, prompts, call)
        negative = [""] * len(prompts)
        if self.family.negative(scales[0]):
            negative = [record.get("negative_prompt", negative_prompt) for record in metadata or [{}] * len(prompts)]
        texts = list(zip(prompts, negative, strict=True))
        size = self.family.size(self.pipeline, call)
        count = steps if levels is None else len(levels)
        pieces: list[Conditions | Ragged] = []
        for rows in self.family.batches(sources, texts, batch_size):
            scheduler = LevelScheduler(
                self.pipeline.scheduler, self.family, size, ode, None, seeds[rows], levels=levels
            )
            with self.policy.recorder(scales[0], dry=True) as recorded:
                self.policy._call(texts[rows], sources[rows.start], seeds[rows], count, scales, scheduler, call)
            extra = self.family.extra_input(recorded.first_input, scheduler.loop_shape)
            family, noted, walked = self.family, self.family.noted(self.pipeline), len(scheduler.levels) - 1
            kept = functools.partial(family.kept, loop_shape=scheduler.loop_shape)
            conditions = recorded.conditions(len(texts[rows]), walked, family.shared, kept, extra, noted)
            members = torch.arange(len(texts[rows]), device=x0.device)
            pieces.append(Ragged([conditions], members * 0, members) if self.family.unpadded else conditions)
        x0 = self._sampled(x0, scheduler.shape[1:])
        sigmas = scheduler.levels[:-1].to(x0.device, torch.float32)
        weights = self.family.error_weight(sigmas, scheduler.walked)
        joined = type(pieces[0]).cat(pieces)  # type: ignore[arg-type]
        x0 = x0.float()
        return CleanSamples(
            x0=x0, conditions=joined, sigmas=sigmas, guidance=scales, error_weights=weights, sound=heard
        )

    def _heard(self, sound: Tensor | None) -> Tensor | None:
        """Sounds as the denoiser has them.

        Raises:
            ConfigError: the network denoises sounds, and there are none.
        """
        if sound is not None:
            return self.family.sound_tokens(self.pipeline, sound.float())
        if self.family.samples_sound:
            raise ConfigError(
                f"{type(self.pipeline).__name__} denoises a sound along with the pictures, and clean pictures alone "
                "cannot be noised; omni_nft works, and algorithms that learn from trajectories, such as flow_grpo"
            )
        return None

    def sigmas(self, levels: Tensor | None = None, steps: int = 1, **call: object) -> Tensor:
        """[K] noise levels after the pipeline's shift, of levels before it or of a rollout of so many steps."""
        return self._walked(levels, steps, call).levels[:-1]

    def before_shift(self, sigmas: Tensor, **call: Any) -> Tensor:
        """[N] levels that the pipeline's shift turns into these noise levels [N], to three digits."""
        grid = torch.linspace(1, 1e-3, 200)
        shifted = self.sigmas(grid, **call)
        levels = np.interp(sigmas.cpu().numpy(), shifted.flip(0).cpu().numpy(), grid.flip(0).numpy())
        return torch.from_numpy(levels).float()

    @torch.no_grad()
    def encoded(self, samples: Sequence[Any], batch_size: int = 64, **call: Any) -> Tensor:
        """[B, ...] latents of pictures, or of videos as lists of them, brought to the size of the pipeline's call.

        Raises:
            ConfigError: pictures where the pipeline makes videos, or the other way round; a video that is too short.
        """
        pipeline = self.pipeline
        if self.family.makes_sound:
            raise ConfigError(
                f"{type(pipeline).__name__} makes sounds, and files of them are not read; a method that learns from "
                "its own samples works"
            )
        video = makes_videos(type(pipeline).__name__)
        if any(isinstance(sample, Image) == video for sample in samples):
            output, given = ("videos", "a picture") if video else ("pictures", "a video")
            raise ConfigError(f"{type(pipeline).__name__} makes {output}, and {given} was given to learn from")
        height, width = call.get("height"), call.get("width")
        if height is None or width is None:
            height, width = (self.family.pixels(pipeline) * side for side in self._walked(None, 1, call).shape[-2:])
        latents = []
        for start in range(0, len(samples), batch_size):
            chunk = list(samples[start : start + batch_size])
            if video:
                chunk = [frames[: self._frames(call, len(frames))] for frames in chunk]
                pixels = pipeline.video_processor.preprocess_video(chunk, height=height, width=width)
            else:
                pixels = pipeline.image_processor.preprocess(chunk, height=height, width=width)
            latents.append(self.family.latents(pipeline, pixels.to(self.policy.device)))
        self.policy.release_vae()
        return torch.cat(latents).float()

    def _sampled(self, x0: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Clean latents without first frames that the pipeline is given; it makes latents of this shape."""
        if x0.dim() == 5 and self.family.images[0]:
            x0 = x0[:, :, -shape[1] :]
        if x0.shape[1:] != shape:
            raise ConfigError(
                f"{type(self.pipeline).__name__} makes latents of the shape {tuple(shape)} with these settings, and "
                f"those to learn from have {tuple(x0.shape[1:])}; the rollout's height, width and num_frames must fit"
            )
        return x0

    def _frames(self, call: dict[str, Any], there: int) -> int:
        """Number of a video's frames that the pipeline's call makes."""
        named = inspect.signature(self.pipeline.__call__).parameters
        wanted = call.get("num_frames") or named[self.family.renamed.get("num_frames", "num_frames")].default
        if there < wanted:
            raise ConfigError(
                f"a video to learn from has {there} frames, and {type(self.pipeline).__name__} makes {wanted}; a "
                "smaller rollout.num_frames works"
            )
        return int(wanted)

    @torch.no_grad()
    def _walked(self, levels: Tensor | None, steps: int, call: dict[str, Any]) -> LevelScheduler:
        """The scheduler after a call of the pipeline for one empty prompt, without the network."""
        size = self.family.size(self.pipeline, call)
        scheduler = LevelScheduler(self.pipeline.scheduler, self.family, size, ode, None, [0], levels=levels)
        with self.policy.recorder(1.0, dry=True):
            count = steps if levels is None else len(levels)
            self.policy._call([("", "")], None, [0], count, (1.0,), scheduler, call)
        return scheduler
