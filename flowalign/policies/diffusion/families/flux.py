"""FLUX.1."""

from collections.abc import Sequence
from typing import Any

from diffusers import DiffusionPipeline, ModelMixin
from PIL.Image import Image

from flowalign.policies.diffusion.families.base import JOINT_ATTENTION, Encoded, option
from flowalign.policies.diffusion.families.guidance import DistilledGuidance
from flowalign.policies.diffusion.families.latents import Packed


class Flux(Packed, DistilledGuidance):
    """FLUX.1 dev and schnell; schnell ignores the guidance scale."""

    name = "flux"
    pipelines = ("FluxPipeline",)
    middle = "transformer_blocks"
    divides_tokens = True
    lora_targets = JOINT_ATTENTION
    text_inputs = {"encoder_hidden_states": "prompt_embeds", "pooled_projections": "pooled_prompt_embeds"}
    shared = ("txt_ids", "img_ids")

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        embeds, pooled, _ = pipeline.encode_prompt(list(prompts), None, **options)
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        return super().token_limits(pipeline) | {"tokenizer_2": option(options, 512)}


class FluxKontext(Flux):
    """FLUX.1 Kontext: edits a picture (arXiv 2506.15742), at the size of the result."""

    name = "flux_kontext"
    pipelines = ("FluxKontextPipeline",)
    images = (1, 1)

    def sources(self, images: Sequence[Image], mask: Image | None, count: int, call: dict[str, Any]) -> dict[str, Any]:
        # the call would bring both to a megapixel
        return call | {"image": images[0], "max_area": call["height"] * call["width"], "_auto_resize": False}


class FluxBeside(Flux):
    """A picture stands beside the channels."""

    images = (1, 1)
    one_each = True
    extra_axis = 2

    def channels(self, denoiser: ModelMixin) -> int:
        return int(denoiser.config.out_channels) // 4


class FluxFill(FluxBeside):
    """FLUX.1 Fill: makes the part of a picture that a mask shows, from the rest and the mask."""

    name = "flux_fill"
    pipelines = ("FluxFillPipeline",)
    takes_mask = True


class FluxControl(FluxBeside):
    """FLUX.1 Canny, Depth and their like: from a picture of edges or of depth."""

    name = "flux_control"
    pipelines = ("FluxControlPipeline",)

    def sources(self, images: Sequence[Image], mask: Image | None, count: int, call: dict[str, Any]) -> dict[str, Any]:
        return call | {"control_image": [images[0]] * count}
