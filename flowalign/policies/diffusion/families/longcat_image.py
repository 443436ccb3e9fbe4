"""LongCat-Image."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from flowalign.policies.diffusion.families.base import JOINT_ATTENTION, Encoded
from flowalign.policies.diffusion.families.guidance import TrueGuidance
from flowalign.policies.diffusion.families.latents import Packed


class LongCatImage(Packed, TrueGuidance):
    """LongCat-Image 6B: guidance rescaled to the norm of the positive call, where it is larger.

    Prompts are not rewritten by its text encoder, as the pipeline's default is.
    """

    name = "longcat_image"
    pipelines = ("LongCatImagePipeline",)
    rescales = True
    lora_targets = JOINT_ATTENTION
    shared = ("txt_ids", "img_ids")

    def check(self, pipeline: DiffusionPipeline) -> None:
        encode = pipeline.encode_prompt

        @functools.wraps(encode)
        def encode_prompt(prompt: Any = None, prompt_embeds: Tensor | None = None, **more: Any) -> Any:
            # which counts prompts where it is given embeddings too
            prompt = prompt if prompt_embeds is None else [""] * len(prompt_embeds)
            return encode(prompt=prompt, prompt_embeds=prompt_embeds, **more)

        pipeline.encode_prompt = encode_prompt

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        # it knows the device by itself
        options = {name: value for name, value in options.items() if name != "device"}
        embeds, _ = pipeline.encode_prompt(prompt=list(prompts), **options)
        return {"prompt_embeds": embeds}

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        return {"tokenizer": int(pipeline.tokenizer_max_length)}

    def arguments(self, guidance: float) -> dict[str, Any]:
        return super().arguments(guidance) | {"enable_prompt_rewrite": False}

    def velocity(self, outputs: Sequence[Any], copies: Sequence[int], guidance: float) -> Tensor:
        guided = super().velocity(outputs, copies, guidance)
        if len(outputs) == 1:
            return guided
        norms = [torch.norm(velocity, dim=-1, keepdim=True) for velocity in (outputs[0], guided)]
        return guided * (norms[0] / (norms[1] + 1e-8)).clamp(max=1.0)
