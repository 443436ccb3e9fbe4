"""HunyuanImage and HunyuanVideo."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import ClassifierFreeGuidance, DiffusionPipeline
from PIL.Image import Image
from torch import Tensor

from flowalign.errors import ConfigError
from flowalign.policies.diffusion.families.base import JOINT_ATTENTION, Encoded
from flowalign.policies.diffusion.families.guidance import DistilledGuidance, TrueGuidance
from flowalign.policies.diffusion.families.latents import Video


class Hunyuan(TrueGuidance):
    """Base of Tencent's pipelines: two text encoders, one of them for letters, and a guider among the components.

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

    name = "hunyuan_image"
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


class HunyuanVideo(DistilledGuidance, Video):
    """HunyuanVideo (arXiv 2412.03603), text to video, which DanceGRPO trained."""

    name = "hunyuan_video"
    pipelines = ("HunyuanVideoPipeline",)
    lora_targets = JOINT_ATTENTION

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        names = ("prompt_embeds", "pooled_prompt_embeds", "prompt_attention_mask")
        return dict(zip(names, pipeline.encode_prompt(list(prompts), **options), strict=True))

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        # the template around a prompt counts too
        return {}


class HunyuanVideo15(Hunyuan, Video):
    """HunyuanVideo 1.5, text to video; room for a first frame, empty here, stands beside the channels."""

    name = "hunyuan_video15"
    pipelines = ("HunyuanVideo15Pipeline",)
    # the text stream ends in the last block
    dead_ends = tuple(f"transformer_blocks.-1.{name}" for name in ("attn.add_q_proj", "attn.to_add_out", "ff_context"))

    def latents(self, pipeline: DiffusionPipeline, pixels: Tensor) -> Tensor:
        return torch.cat([super(HunyuanVideo15, self).latents(pipeline, one) for one in pixels.split(1)])

    def decode(self, pipeline: DiffusionPipeline, latents: Tensor) -> Tensor:
        # diffusers' VAE masks its attention for one video only
        return torch.cat([super(HunyuanVideo15, self).decode(pipeline, one) for one in latents.split(1)])


class HunyuanVideo15ImageToVideo(HunyuanVideo15):
    """HunyuanVideo 1.5, image to video, in the size among the pipeline's own that is nearest to the picture's."""

    name = "hunyuan_video15_i2v"
    pipelines = ("HunyuanVideo15ImageToVideoPipeline",)
    images = (1, 1)

    def check_size(self, pipeline: DiffusionPipeline, call: dict[str, Any]) -> None:
        super().check_size(pipeline, call)
        if not {"height", "width"} <= call.keys():
            return
        size = call["height"], call["width"]
        nearest = pipeline.video_processor.calculate_default_height_width(*size, pipeline.target_size)
        if size != nearest:
            height, width = nearest
            raise ConfigError(
                f"{type(pipeline).__name__} cannot make height {size[0]} with width {size[1]}; "
                f"height {height} with width {width} would work"
            )

    def sources(self, images: Sequence[Image], mask: Image | None, count: int, call: dict[str, Any]) -> dict[str, Any]:
        # the sides are the picture's
        return {"image": images[0]} | {name: value for name, value in call.items() if name not in ("height", "width")}
