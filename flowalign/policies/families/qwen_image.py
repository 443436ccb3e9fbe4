"""Qwen-Image."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flowalign.policies.families.base import JOINT_ATTENTION, Encoded, Packed, TrueGuidance, VideoVAE, rescaling


class QwenImage(Packed, TrueGuidance, VideoVAE):
    """Qwen-Image (arXiv 2508.02324): guidance by two calls, rescaled to the norm of the positive one."""

    pipelines = ("QwenImagePipeline",)
    lora_targets = JOINT_ATTENTION

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        embeds, mask = pipeline.encode_prompt(list(prompts), **options)
        lengths = [embeds.shape[1]] * len(prompts) if mask is None else mask.sum(1).tolist()
        return {"prompt_embeds": [row[:length] for row, length in zip(embeds, lengths, strict=True)]}

    def stack(self, rows: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        embeds = [row["prompt_embeds"] for row in rows]
        # one token of padding more than needed: the pipeline drops a mask without any, and batches with and without
        # one cannot be joined
        longest = max(map(len, embeds)) + 1
        embeds = [torch.cat([e, e.new_zeros(longest - len(e), e.shape[1])]) for e in embeds]
        masks = [torch.ones(len(row["prompt_embeds"]), dtype=torch.long) for row in rows]
        mask = pad_sequence(masks, batch_first=True)
        return {
            "prompt_embeds": torch.stack(embeds),
            "prompt_embeds_mask": torch.cat([mask, mask.new_zeros(len(mask), 1)], 1),
        }

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        return {"tokenizer": int(pipeline.tokenizer_max_length)}

    def arguments(self, guidance: float) -> dict[str, Any]:
        return {"true_cfg_scale": guidance}

    def velocity(self, outputs: Sequence[Any], copies: Sequence[int], guidance: float) -> Tensor:
        guided = super().velocity(outputs, copies, guidance)
        return guided * rescaling(outputs[0], guided) if len(outputs) == 2 else guided

    def latents(self, pipeline: DiffusionPipeline, pixels: Tensor) -> Tensor:
        return super().latents(pipeline, pixels[:, :, None])[:, :, 0]

    def decode(self, pipeline: DiffusionPipeline, latents: Tensor) -> Tensor:
        return super().decode(pipeline, latents[:, :, None])[:, :, 0]

    def pictures(self, pipeline: DiffusionPipeline, pixels: Tensor) -> list[Any]:
        return pipeline.image_processor.postprocess(pixels, output_type="pil")
