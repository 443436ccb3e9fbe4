"""Sana."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from diffusers import AutoencoderKLWan, DiffusionPipeline
from torch import Tensor

from flowalign.policies.diffusion.families.base import ATTENTION, Encoded, MaskedEncoding, refuse
from flowalign.policies.diffusion.families.latents import VideoVAE


class Sana(MaskedEncoding):
    """Sana (arXiv 2410.10629), on its scheduler's own noise levels by steps of first order."""

    name = "sana"
    pipelines = ("SanaPipeline",)
    lora_targets = ATTENTION

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        instruction = inspect.signature(type(pipeline).__call__).parameters["complex_human_instruction"].default
        return super().encode(pipeline, prompts, **{"complex_human_instruction": instruction} | options)

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        # the instruction before a prompt counts too
        return {}

    def multiple(self, pipeline: DiffusionPipeline) -> int:
        # whatever the VAE
        return 32

    def arguments(self, guidance: float) -> dict[str, Any]:
        # its negative prompt is an empty text by default, which excludes embeddings
        return super().arguments(guidance) | {"use_resolution_binning": False, "negative_prompt": None}

    def velocity(self, outputs: Sequence[Any], copies: Sequence[int], guidance: float) -> Tensor:
        return super().velocity([output.float() for output in outputs], copies, guidance)

    def latents(self, pipeline: DiffusionPipeline, pixels: Tensor) -> Tensor:
        return pipeline.vae.encode(pixels.to(pipeline.vae.dtype)).latent * pipeline.vae.config.scaling_factor

    def decode(self, pipeline: DiffusionPipeline, latents: Tensor) -> Tensor:
        latents = (latents / pipeline.vae.config.scaling_factor).to(pipeline.vae.dtype)
        return pipeline.vae.decode(latents, return_dict=False)[0]


class SanaVideo(VideoVAE, Sana):
    """Sana-Video (arXiv 2509.24695): Sana's text side and Wan's VAE, by steps of first order."""

    name = "sana_video"
    pipelines = ("SanaVideoPipeline",)
    renamed: ClassVar[Mapping[str, str]] = {"num_frames": "frames"}

    def check(self, pipeline: DiffusionPipeline) -> None:
        if not isinstance(pipeline.vae, AutoencoderKLWan):
            raise refuse(pipeline, f"its VAE is {type(pipeline.vae).__name__}, and AutoencoderKLWan works")
