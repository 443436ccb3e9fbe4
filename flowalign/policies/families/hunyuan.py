"""HunyuanImage and HunyuanVideo."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import ClassifierFreeGuidance, DiffusionPipeline
from torch import Tensor

from flowalign.policies.families.base import JOINT_ATTENTION, Encoded, TrueGuidance, Video


class Hunyuan(TrueGuidance):
    """What Tencent's pipelines share: two text encoders, one of them for letters, and a guider among the components.

    The guider is set to plain guidance over all steps, in the place of the projected one of HunyuanImage.
    """

    lora_targets = JOINT_ATTENTION
    guider: ClassifierFreeGuidance

    def check(self, pipeline: DiffusionPipeline) -> None:
        self.guider = pipeline.guider = ClassifierFreeGuidance(1.0)

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        names = ("prompt_embeds", "prompt_embeds_mask", "prompt_embeds_2", "prompt_embeds_mask_2")
        return dict(zip(names, pipeline.encode_prompt(list(prompts), batch_size=len(prompts), **options), strict=True))

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        # the chat template around a prompt counts too
        return {}

    def arguments(self, guidance: float) -> dict[str, Any]:
        self.guider.guidance_scale = guidance
        return {}


class HunyuanImage(Hunyuan):
    """HunyuanImage 2.1; in its distilled release the guidance scale is an input."""

    pipelines = ("HunyuanImagePipeline",)
    embedded: bool

    def check(self, pipeline: DiffusionPipeline) -> None:
        super().check(pipeline)
        pipeline.ocr_guider = self.guider
        self.embedded = pipeline.transformer.config.guidance_embeds

    def negative(self, guidance: float) -> bool:
        return super().negative(guidance) and not self.embedded

    def arguments(self, guidance: float) -> dict[str, Any]:
        if self.embedded:
            return {"distilled_guidance_scale": guidance}
        return super().arguments(guidance)


class HunyuanVideo15(Hunyuan, Video):
    """HunyuanVideo 1.5, text to video; room for a first frame, empty here, stands beside the channels."""

    pipelines = ("HunyuanVideo15Pipeline",)
    # it computes NaN for the padding of a text, drops it, and has NaN gradients (diffusers 0.42)
    frozen = ("token_refiner",)

    def decode(self, pipeline: DiffusionPipeline, latents: Tensor) -> Tensor:
        # diffusers' VAE masks its attention for one video only
        return torch.cat([super(HunyuanVideo15, self).decode(pipeline, one) for one in latents.split(1)])
