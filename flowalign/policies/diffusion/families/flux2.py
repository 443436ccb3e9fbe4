"""FLUX.2."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModelMixin
from PIL.Image import Image
from torch import Tensor

from flowalign.policies.diffusion.families.base import JOINT_ATTENTION, Encoded
from flowalign.policies.diffusion.families.guidance import DistilledGuidance, TrueGuidance
from flowalign.policies.diffusion.families.latents import Packed, Tokens


class Flux2Latents(Tokens, Packed):
    """Latents are 2x2 patches normalised channel by channel, [B, 4 C, H/2, W/2]; tokens are their positions."""

    # the second part of the network has one matrix for queries, keys, values and the MLP
    lora_targets = (*JOINT_ATTENTION, "attn.to_qkv_mlp_proj")
    images = (0, 10)
    divides_tokens = True

    def sources(self, images: Sequence[Image], mask: Image | None, count: int, call: dict[str, Any]) -> dict[str, Any]:
        return call | {"image": list(images)}

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        # the chat template around a prompt counts too
        return {}

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        embeds, _ = pipeline.encode_prompt(list(prompts), **options)
        return {"prompt_embeds": embeds}

    def channels(self, denoiser: ModelMixin) -> int:
        return int(denoiser.config.in_channels)

    def pixels(self, pipeline: DiffusionPipeline) -> int:
        return 2 * int(pipeline.vae_scale_factor)

    def size(self, pipeline: DiffusionPipeline, call: dict[str, Any]) -> tuple[int, ...]:
        height, width = super().size(pipeline, call)
        return height // 2, width // 2

    @staticmethod
    def _statistics(pipeline: DiffusionPipeline, like: Tensor) -> tuple[Tensor, Tensor]:
        norm = pipeline.vae.bn
        std = torch.sqrt(norm.running_var + pipeline.vae.config.batch_norm_eps)
        return norm.running_mean.view(1, -1, 1, 1).to(like), std.view(1, -1, 1, 1).to(like)

    def latents(self, pipeline: DiffusionPipeline, pixels: Tensor) -> Tensor:
        latents = pipeline._patchify_latents(pipeline.vae.encode(pixels.to(pipeline.vae.dtype)).latent_dist.mode())
        mean, std = self._statistics(pipeline, latents)
        return (latents - mean) / std

    def decode(self, pipeline: DiffusionPipeline, latents: Tensor) -> Tensor:
        mean, std = self._statistics(pipeline, latents)
        latents = pipeline._unpatchify_latents(latents * std + mean)
        return pipeline.vae.decode(latents.to(pipeline.vae.dtype), return_dict=False)[0]


class Flux2(Flux2Latents, DistilledGuidance):
    """FLUX.2 dev, whose guidance scale is an input."""

    name = "flux2"
    pipelines = ("Flux2Pipeline",)


class Flux2Klein(Flux2Latents, TrueGuidance):
    """FLUX.2 klein; the step-distilled ones are to be sampled at guidance 1."""

    name = "flux2_klein"
    pipelines = ("Flux2KleinPipeline",)
