"""FLUX.1."""

from collections.abc import Sequence
from typing import Any

from diffusers import DiffusionPipeline

from flowalign.policies.families.base import JOINT_ATTENTION, DistilledGuidance, Encoded, Packed, option


class Flux(Packed, DistilledGuidance):
    """FLUX.1 dev and schnell; schnell ignores the guidance scale."""

    pipelines = ("FluxPipeline",)
    lora_targets = JOINT_ATTENTION
    shared = ("txt_ids", "img_ids")

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        embeds, pooled, _ = pipeline.encode_prompt(list(prompts), None, **options)
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        return super().token_limits(pipeline) | {"tokenizer_2": option(options, 512)}
