"""The shapes of latents in a pipeline's loop, and the decoding of videos into frames."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModelMixin
from torch import Tensor

from flowalign.policies.diffusion.families.base import Family


class Tokens(Family):
    """Latents travel as a token a position, [B, H * W, C] or [B, F * H * W, C]."""

    def unpack(self, latents: Tensor, size: Sequence[int]) -> Tensor:
        return latents.transpose(1, 2).unflatten(2, tuple(size))

    def pack(self, latents: Tensor) -> Tensor:
        return latents.flatten(2).transpose(1, 2)


class Packed(Family):
    """Latents travel as tokens of 2x2 patches, [B, H/2 * W/2, 4 C]."""

    def channels(self, denoiser: ModelMixin) -> int:
        return int(denoiser.config.in_channels) // 4

    def size(self, pipeline: DiffusionPipeline, call: dict[str, Any]) -> tuple[int, ...]:
        scale = pipeline.vae_scale_factor
        default = getattr(pipeline, "default_sample_size", 128) * scale
        height, width = (2 * (int(call.get(side) or default) // (2 * scale)) for side in ("height", "width"))
        return height, width

    def multiple(self, pipeline: DiffusionPipeline) -> int:
        return 2 * int(pipeline.vae_scale_factor)

    def unpack(self, latents: Tensor, size: Sequence[int]) -> Tensor:
        height, width = size
        patches = latents.unflatten(2, (-1, 2, 2)).unflatten(1, (height // 2, width // 2))
        return patches.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)

    def pack(self, latents: Tensor) -> Tensor:
        patches = latents.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
        return patches.permute(0, 2, 4, 1, 3, 5).flatten(3, 5).flatten(1, 2)


class Video(Family):
    """Samples are videos, [B, C, F, H, W]."""

    def pictures(self, pipeline: DiffusionPipeline, pixels: Tensor) -> list[Any]:
        return pipeline.video_processor.postprocess_video(pixels, output_type="pil")


class NormalisedVAE(Family):
    """Latents [B, C, ...] are normalised channel by channel."""

    @staticmethod
    def _statistics(pipeline: DiffusionPipeline, like: Tensor) -> tuple[Tensor, Tensor]:
        config, shape = pipeline.vae.config, (1, -1, *[1] * (like.dim() - 2))
        mean, std = (torch.tensor(v).view(shape).to(like) for v in (config.latents_mean, config.latents_std))
        return mean, std

    def latents(self, pipeline: DiffusionPipeline, pixels: Tensor) -> Tensor:
        latents = pipeline.vae.encode(pixels.to(pipeline.vae.dtype)).latent_dist.mode()
        mean, std = self._statistics(pipeline, latents)
        return (latents - mean) / std

    def decode(self, pipeline: DiffusionPipeline, latents: Tensor) -> Tensor:
        latents = latents.to(pipeline.vae.dtype)
        mean, std = self._statistics(pipeline, latents)
        return pipeline.vae.decode(latents * std + mean, return_dict=False)[0]


class VideoVAE(NormalisedVAE, Video):
    """Wan's VAE, [B, C, F, H, W]."""


class OneFrame(VideoVAE):
    """Pictures by Wan's VAE, [B, C, H, W]."""

    def latents(self, pipeline: DiffusionPipeline, pixels: Tensor) -> Tensor:
        return super().latents(pipeline, pixels[:, :, None])[:, :, 0]

    def decode(self, pipeline: DiffusionPipeline, latents: Tensor) -> Tensor:
        return super().decode(pipeline, latents[:, :, None])[:, :, 0]

    def pictures(self, pipeline: DiffusionPipeline, pixels: Tensor) -> list[Any]:
        return pipeline.image_processor.postprocess(pixels, output_type="pil")
