"""LTX-Video."""

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from flowalign.policies.diffusion.families.base import ATTENTION, Encoded, NetworkInput, option
from flowalign.policies.diffusion.families.latents import Tokens, VideoVAE


class LTX(Tokens, VideoVAE):
    """LTX-Video, text to video (arXiv 2501.00103)."""

    name = "ltx"
    pipelines = ("LTXPipeline",)
    lora_targets = ATTENTION

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        embeds, mask, *_ = pipeline.encode_prompt(list(prompts), do_classifier_free_guidance=False, **options)
        return {"prompt_embeds": embeds, "prompt_attention_mask": mask}

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        return {"tokenizer": option(options, 128)}

    def multiple(self, pipeline: DiffusionPipeline) -> int:
        # whatever the VAE
        return 32

    def velocity(self, outputs: Sequence[Any], copies: Sequence[int], guidance: float) -> Tensor:
        return super().velocity([output.float() for output in outputs], copies, guidance)

    def size(self, pipeline: DiffusionPipeline, call: dict[str, Any]) -> tuple[int, ...]:
        default = inspect.signature(type(pipeline).__call__).parameters
        frames, height, width = (call.get(n) or default[n].default for n in ("num_frames", "height", "width"))
        space = pipeline.vae_spatial_compression_ratio
        return (frames - 1) // pipeline.vae_temporal_compression_ratio + 1, height // space, width // space

    @staticmethod
    def _statistics(pipeline: DiffusionPipeline, like: Tensor) -> tuple[Tensor, Tensor]:
        vae = pipeline.vae
        mean, std = (v.view(1, -1, 1, 1, 1).to(like) for v in (vae.latents_mean, vae.latents_std))
        return mean, std / vae.config.scaling_factor

    def decode(self, pipeline: DiffusionPipeline, latents: Tensor) -> Tensor:
        vae = pipeline.vae
        mean, std = self._statistics(pipeline, latents)
        # a VAE that also denoises is asked not to, as the pipeline does by default
        timestep = torch.zeros(len(latents)).to(latents) if vae.config.timestep_conditioning else None
        return vae.decode((latents * std + mean).to(vae.dtype), timestep, return_dict=False)[0]


class LTXImageToVideo(LTX):
    """LTX-Video, image to video: the first frame is given, and only the others meet the scheduler, as videos."""

    name = "ltx_i2v"
    pipelines = ("LTXImageToVideoPipeline",)
    images = (1, 1)
    one_each = True

    def extra_input(self, first_input: Any, loop_shape: Sequence[int]) -> Tensor | None:
        height, width = loop_shape[3:]
        return super().unpack(first_input[:, : height * width], (1, height, width))

    def first_frames(self, extra: Tensor | None) -> Tensor | None:
        return extra

    def unpack(self, latents: Tensor, size: Sequence[int]) -> Tensor:
        # tokens are the network's, of the first frame too
        return latents if latents.dim() == 5 else super().unpack(latents[:, -math.prod(size) :], size)

    def pack(self, latents: Tensor) -> Tensor:
        return latents

    def network_input(self, latents: Tensor, extra: Any) -> NetworkInput:
        return super().pack(torch.cat([extra, latents], 2))

    def predicted(self, output: Tensor, count: int) -> Tensor:
        return output
