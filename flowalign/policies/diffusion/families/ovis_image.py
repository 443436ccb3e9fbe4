"""Ovis-Image."""

from collections.abc import Sequence
from typing import Any

from diffusers import DiffusionPipeline

from flowalign.policies.diffusion.families.base import JOINT_ATTENTION, Encoded
from flowalign.policies.diffusion.families.guidance import TrueGuidance
from flowalign.policies.diffusion.families.latents import Packed


class OvisImage(Packed, TrueGuidance):
    """Ovis-Image 7B: FLUX.1's layout, for letters in pictures; texts are padded to one length."""

    name = "ovis_image"
    pipelines = ("OvisImagePipeline",)
    lora_targets = JOINT_ATTENTION
    shared = ("txt_ids", "img_ids")

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        embeds, *_ = pipeline.encode_prompt(list(prompts), do_classifier_free_guidance=False, **options)
        return {"prompt_embeds": embeds}

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        # the system prompt before a prompt counts too
        return {}

    def arguments(self, guidance: float) -> dict[str, Any]:
        # its negative prompt is an empty text by default, which excludes embeddings
        return super().arguments(guidance) | {"negative_prompt": None}
