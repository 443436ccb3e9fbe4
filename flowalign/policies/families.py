"""Model families: the little that differs between diffusers pipelines."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from flowalign.errors import FlowalignError


class Family:
    """What a pipeline's own call does not tell. Subclass it for a new family and add the class to `FAMILIES`."""

    pipelines: ClassVar[tuple[str, ...]]
    """names of the diffusers pipeline classes"""
    denoiser: ClassVar[str] = "transformer"
    """the pipeline's attribute that is trained"""
    lora_targets: ClassVar[tuple[str, ...]]
    """module names LoRA goes on by default"""
    shared: ClassVar[tuple[str, ...]] = ()
    """tensor arguments of the denoiser without a batch axis"""

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> dict[str, Tensor]:
        """Prompt embeddings as arguments of the pipeline's call, each [len(prompts), ...]."""
        raise NotImplementedError

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        """How many tokens each tokenizer of the pipeline lets through."""
        names = [n for n in pipeline.components if n.startswith("tokenizer") and getattr(pipeline, n) is not None]
        return {name: getattr(pipeline, name).model_max_length for name in names}

    def velocity(self, outputs: Sequence[Tensor], copies: Sequence[int], guidance: float) -> Tensor:
        """The guided velocity from the denoiser's outputs; here classifier-free guidance by concatenation.

        The arithmetic is the pipeline's own, in the network's dtype, so that replay equals rollout.
        """
        if copies[0] == 1:
            return outputs[0]
        unconditional, conditional = outputs[0].chunk(2)
        return unconditional + guidance * (conditional - unconditional)

    def latents(self, pipeline: DiffusionPipeline, pixels: Tensor) -> Tensor:
        """Pictures [B, 3, H, W] in [-1, 1] to latents, the mean of the VAE's posterior: the inverse of `decode`."""
        vae = pipeline.vae
        latents = vae.encode(pixels.to(vae.dtype)).latent_dist.mode()
        return (latents - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor

    def decode(self, pipeline: DiffusionPipeline, latents: Tensor) -> Tensor:
        """Latents to pictures [B, 3, H, W] in [-1, 1]."""
        vae = pipeline.vae
        latents = latents / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
        return vae.decode(latents.to(vae.dtype), return_dict=False)[0]


class SD3(Family):
    """Stable Diffusion 3 and 3.5."""

    pipelines = ("StableDiffusion3Pipeline",)
    # The joint attention of both streams, as Flow-GRPO trains it.
    lora_targets = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
    )

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> dict[str, Tensor]:
        embeds, _, pooled, _ = pipeline.encode_prompt(
            list(prompts), None, None, do_classifier_free_guidance=False, **options
        )
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        limits = super().token_limits(pipeline)
        if "tokenizer_3" in limits:
            limits["tokenizer_3"] = options.get("max_sequence_length", 256)
        return limits


FAMILIES: tuple[type[Family], ...] = (SD3,)


def family_of(pipeline_class: str) -> Family:
    """The family a pipeline class belongs to."""
    for family in FAMILIES:
        if pipeline_class in family.pipelines:
            return family()
    known = ", ".join(name for family in FAMILIES for name in family.pipelines)
    raise FlowalignError(
        f"no model family knows the pipeline {pipeline_class}; supported: {known}. "
        "A new one is a subclass of flowalign.policies.families.Family"
    )


def to_device(module: torch.nn.Module | None, device: torch.device | str) -> None:
    """Move a pipeline component that may be absent."""
    if module is not None:
        module.to(device)
