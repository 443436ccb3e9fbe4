"""Chroma."""

from collections.abc import Sequence
from typing import Any

from diffusers import DiffusionPipeline

from flowalign.policies.diffusion.families.base import JOINT_ATTENTION, Encoded, option
from flowalign.policies.diffusion.families.guidance import TrueGuidance
from flowalign.policies.diffusion.families.latents import Packed


class Chroma(Packed, TrueGuidance):
    """Chroma: FLUX.1 schnell's successor without distilled guidance, and with a mask on the text."""

    name = "chroma"
    pipelines = ("ChromaPipeline",)
    lora_targets = JOINT_ATTENTION
    shared = ("txt_ids", "img_ids")

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        embeds, _, mask, *_ = pipeline.encode_prompt(list(prompts), do_classifier_free_guidance=False, **options)
        return {"prompt_embeds": embeds, "prompt_attention_mask": mask}

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        return {"tokenizer": option(options, 512)}
