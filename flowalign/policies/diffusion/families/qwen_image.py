"""Qwen-Image."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL.Image import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flowalign.policies.diffusion.families.base import ATTENTION, JOINT_ATTENTION, Encoded
from flowalign.policies.diffusion.families.guidance import TrueGuidance, rescaling
from flowalign.policies.diffusion.families.latents import OneFrame, Packed, Tokens


class QwenImage(Packed, TrueGuidance, OneFrame):
    """Qwen-Image (arXiv 2508.02324): guidance by two calls, rescaled to the norm of the positive one."""

    name = "qwen_image"
    pipelines = ("QwenImagePipeline",)
    rescales = True
    middle = "transformer_blocks"
    divides_tokens = True
    lora_targets = JOINT_ATTENTION
    # the text stream ends in the last block
    dead_ends = tuple(f"transformer_blocks.-1.{name}" for name in ("attn.add_q_proj", "attn.to_add_out", "txt_mlp"))

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        embeds, mask = pipeline.encode_prompt(list(prompts), **options)
        lengths = [embeds.shape[1]] * len(prompts) if mask is None else mask.sum(1).tolist()
        return {"prompt_embeds": [row[:length] for row, length in zip(embeds, lengths, strict=True)]}

    def stack(self, rows: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        embeds = [row["prompt_embeds"] for row in rows]
        # one token of padding more than needed: the pipeline drops a mask without any, and batches with and without
        # one cannot be joined
        longest = -(-(max(map(len, embeds)) + 1) // self.parts) * self.parts
        embeds = [torch.cat([e, e.new_zeros(longest - len(e), e.shape[1])]) for e in embeds]
        masks = [torch.ones(len(row["prompt_embeds"]), dtype=torch.long) for row in rows]
        mask = pad_sequence(masks, batch_first=True)
        return {
            "prompt_embeds": torch.stack(embeds),
            "prompt_embeds_mask": torch.nn.functional.pad(mask, (0, longest - mask.shape[1])),
        }

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        return {"tokenizer": int(pipeline.tokenizer_max_length)}

    def arguments(self, guidance: float) -> dict[str, Any]:
        return {"true_cfg_scale": guidance}

    def velocity(self, outputs: Sequence[Any], copies: Sequence[int], guidance: float) -> Tensor:
        guided = super().velocity(outputs, copies, guidance)
        return guided * rescaling(outputs[0], guided) if len(outputs) == 2 else guided


class QwenImageEdit(QwenImage):
    """Qwen-Image-Edit: the text encoder, too, sees the picture that is edited."""

    name = "qwen_image_edit"
    pipelines = ("QwenImageEditPipeline",)
    images = (1, 1)
    encodes_images = True

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        return super().encode(pipeline, prompts, **options | {"image": self.seen(pipeline, options["image"])})

    def seen(self, pipeline: DiffusionPipeline, images: Sequence[Image]) -> Any:
        """The pictures at the size that the pipeline shows them to the text encoder."""
        ratio = images[0].width / images[0].height
        width, height, _ = pipeline_qwenimage_edit.calculate_dimensions(1024 * 1024, ratio)
        return pipeline.image_processor.resize(images[0], height, width)


class QwenImageEditPlus(QwenImageEdit):
    """Qwen-Image-Edit 2509 and later: edits up to three pictures into one."""

    name = "qwen_image_edit_plus"
    pipelines = ("QwenImageEditPlusPipeline",)
    images = (1, 3)
    # diffusers' call takes no more
    largest_batch = 1

    def seen(self, pipeline: DiffusionPipeline, images: Sequence[Image]) -> Any:
        plus = pipeline_qwenimage_edit_plus
        sizes = [plus.calculate_dimensions(plus.CONDITION_IMAGE_SIZE, image.width / image.height) for image in images]
        resize = pipeline.image_processor.resize
        return [resize(image, height, width) for image, (width, height) in zip(images, sizes, strict=True)]

    def sources(self, images: Sequence[Image], mask: Image | None, count: int, call: dict[str, Any]) -> dict[str, Any]:
        return call | {"image": list(images)}


class QwenImage21(Tokens, QwenImage):
    """Qwen-Image 2.1, text to image: texts and pictures in one sequence, where a text's length moves the picture."""

    name = "qwen_image21"
    pipelines = ("QwenImage21Pipeline",)
    lora_targets = ATTENTION
    dead_ends = ()
    unpadded = True

    def channels(self, denoiser: ModelMixin) -> int:
        return int(denoiser.config.in_channels)

    def size(self, pipeline: DiffusionPipeline, call: dict[str, Any]) -> tuple[int, ...]:
        height, width = (2 * (int(call.get(side) or 1024) // self.multiple(pipeline)) for side in ("height", "width"))
        return height, width

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        embeds, *_ = pipeline.encode_prompt(list(prompts), **options)
        return {"prompt_embeds": embeds}

    def stack(self, rows: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {"prompt_embeds": torch.stack([row["prompt_embeds"] for row in rows])}

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        # the chat template around a prompt counts too
        return {}

    def arguments(self, guidance: float) -> dict[str, Any]:
        # the cache of one step would be read at others
        return super().arguments(guidance) | {"use_kv_cache": False}

    def predicted(self, output: Tensor, count: int) -> Tensor:
        return output[:, -count:]

    def latents(self, pipeline: DiffusionPipeline, pixels: Tensor) -> Tensor:
        # nothing is transparent
        return super().latents(pipeline, torch.cat([pixels, torch.ones_like(pixels[:, :1])], 1))

    def pictures(self, pipeline: DiffusionPipeline, pixels: Tensor) -> list[Any]:
        # of four channels, the last for transparency, which rewards do not know
        return super().pictures(pipeline, pixels[:, :3])

    def velocity(self, outputs: Sequence[Any], copies: Sequence[int], guidance: float) -> Tensor:
        return TrueGuidance.velocity(self, outputs, copies, guidance)
