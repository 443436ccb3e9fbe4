"""Stable Diffusion 3 and 3.5."""

from collections.abc import Sequence
from typing import Any

from diffusers import DiffusionPipeline, ModelMixin

from flowalign.policies.diffusion.families.base import JOINT_ATTENTION, Encoded, Family, option


class SD3(Family):
    """Stable Diffusion 3 and 3.5 (arXiv 2403.03206)."""

    name = "sd3"
    pipelines = ("StableDiffusion3Pipeline",)
    lora_targets = JOINT_ATTENTION
    middle = "transformer_blocks"
    text_inputs = {"encoder_hidden_states": "prompt_embeds", "pooled_projections": "pooled_prompt_embeds"}

    def positions(self, denoiser: ModelMixin) -> int | None:
        return int(denoiser.config.pos_embed_max_size)

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        embeds, _, pooled, _ = pipeline.encode_prompt(
            list(prompts), None, None, do_classifier_free_guidance=False, **options
        )
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        limits = super().token_limits(pipeline)
        if "tokenizer_3" in limits:
            limits["tokenizer_3"] = option(options, 256)
        return limits
