"""ERNIE-Image."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from flowalign.policies.diffusion.families.base import ATTENTION, Encoded, Family


class ErnieImage(Family):
    """ERNIE-Image: latents are 2x2 patches normalised channel by channel; texts travel in lists, each of its length.

    Prompts are not enhanced by the pipeline's language model, as its default is.
    """

    name = "ernie_image"
    pipelines = ("ErnieImagePipeline",)
    lora_targets = ATTENTION

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        return {"prompt_embeds": pipeline.encode_prompt(list(prompts), **options)}

    def stack(self, rows: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {"prompt_embeds": [row["prompt_embeds"] for row in rows]}

    def arguments(self, guidance: float) -> dict[str, Any]:
        return super().arguments(guidance) | {"use_pe": False}

    @staticmethod
    def _statistics(pipeline: DiffusionPipeline, like: Tensor) -> tuple[Tensor, Tensor]:
        norm = pipeline.vae.bn
        mean, std = norm.running_mean, torch.sqrt(norm.running_var + 1e-5)
        return mean.view(1, -1, 1, 1).to(like), std.view(1, -1, 1, 1).to(like)

    def latents(self, pipeline: DiffusionPipeline, pixels: Tensor) -> Tensor:
        latents = pipeline._patchify_latents(pipeline.vae.encode(pixels.to(pipeline.vae.dtype)).latent_dist.mode())
        mean, std = self._statistics(pipeline, latents)
        return (latents - mean) / std

    def decode(self, pipeline: DiffusionPipeline, latents: Tensor) -> Tensor:
        mean, std = self._statistics(pipeline, latents)
        latents = pipeline._unpatchify_latents(latents * std + mean)
        return pipeline.vae.decode(latents.to(pipeline.vae.dtype), return_dict=False)[0]
