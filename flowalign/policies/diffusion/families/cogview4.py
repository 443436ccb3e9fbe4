"""CogView4."""

from collections.abc import Sequence
from typing import Any

from diffusers import DiffusionPipeline
from torch import Tensor, nn

from flowalign.policies.diffusion.families.base import ATTENTION, Encoded, option
from flowalign.policies.diffusion.families.guidance import TrueGuidance


class CogView4(TrueGuidance):
    """CogView4 6B; its text is padded to a multiple of 16 tokens, and the padding read."""

    name = "cogview4"
    pipelines = ("CogView4Pipeline",)
    lora_targets = ATTENTION
    unpadded = True

    def check(self, pipeline: DiffusionPipeline) -> None:
        pipeline.transformer.rope.register_forward_hook(_there)

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        embeds, _ = pipeline.encode_prompt(list(prompts), do_classifier_free_guidance=False, **options)
        return {"prompt_embeds": embeds}

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        return {"tokenizer": option(options, 1024)}


def _there(module: nn.Module, inputs: tuple[Tensor], angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Rotary angles on the device of the latents; diffusers' are on the host, which each block would wait to send."""
    cos, sin = (angle.to(inputs[0].device, non_blocking=True) for angle in angles)
    return cos, sin
