"""Z-Image."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModelMixin
from torch import Tensor

from flowalign.policies.diffusion.families.base import ATTENTION, Encoded, Family


class ZImage(Family):
    """Z-Image and its turbo: samples and captions travel in lists, and the network predicts x0 - noise."""

    name = "z_image"
    pipelines = ("ZImagePipeline",)
    lora_targets = ATTENTION
    unconditional = 1

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        embeds, _ = pipeline.encode_prompt(list(prompts), do_classifier_free_guidance=False, **options)
        return {"prompt_embeds": embeds}

    def positions(self, denoiser: ModelMixin) -> int | None:
        return int(min(denoiser.config.axes_lens[1:]))

    def multiple(self, pipeline: DiffusionPipeline) -> int:
        return 2 * int(pipeline.vae_scale_factor)

    def stack(self, rows: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {"prompt_embeds": [row["prompt_embeds"] for row in rows]}

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        # the chat template around a prompt counts too
        return {}

    def arguments(self, guidance: float) -> dict[str, Any]:
        # the pipeline's is the weight of (positive - negative) on top of the positive velocity
        return {"guidance_scale": guidance - 1}

    def velocity(self, outputs: Sequence[Any], copies: Sequence[int], guidance: float) -> Tensor:
        output = torch.stack(outputs[0]).float().squeeze(2)
        if copies[0] == 1:
            return -output
        positive, negative = output.chunk(2)
        return -(positive + (guidance - 1) * (positive - negative))

    def network_input(self, latents: Tensor, extra: Tensor | None) -> list[Tensor]:
        return list(latents.unsqueeze(2).unbind(0))
