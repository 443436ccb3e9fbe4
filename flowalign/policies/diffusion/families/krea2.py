"""Krea 2."""

from collections.abc import Sequence
from typing import Any

from diffusers import DiffusionPipeline
from torch import Tensor

from flowalign.policies.diffusion.families.base import ATTENTION, Encoded
from flowalign.policies.diffusion.families.guidance import TrueGuidance
from flowalign.policies.diffusion.families.latents import OneFrame, Packed


class Krea2(Packed, TrueGuidance, OneFrame):
    """Krea 2: Qwen-Image's VAE, and several layers of the text encoder at once."""

    name = "krea2"
    pipelines = ("Krea2Pipeline",)
    lora_targets = ATTENTION
    shared = ("position_ids",)

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        embeds, mask = pipeline.encode_prompt(list(prompts), **options)
        return {"prompt_embeds": embeds, "prompt_embeds_mask": mask}

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        # the template around a prompt counts too
        return {}

    def arguments(self, guidance: float) -> dict[str, Any]:
        # the pipeline's is the weight of (positive - negative) on top of the positive velocity
        return {"guidance_scale": guidance - 1}

    def velocity(self, outputs: Sequence[Any], copies: Sequence[int], guidance: float) -> Tensor:
        positive: Tensor = outputs[0]
        return positive if len(outputs) == 1 else positive + (guidance - 1) * (positive - outputs[1])
