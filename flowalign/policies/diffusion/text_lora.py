"""LoRA adapters of the text encoders (TexForce, arXiv 2311.15657), whose embeddings replay makes again."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.training_utils import cast_training_params
from peft import LoraConfig

from flowalign.errors import ConfigError, nearest
from flowalign.policies.diffusion.families import to_device
from flowalign.policies.settings import TextLora


def add_text_lora(policy: Any, settings: TextLora) -> None:
    """Train a LoRA adapter of the text encoders, with the denoiser's or alone.

    Raises:
        ConfigError: the pipeline has no such encoder, or is not one whose texts can be encoded again.
    """
    name = type(policy.pipeline).__name__
    if not policy.family.text_inputs:
        raise ConfigError(f"model.text_lora: how {name} uses its embeddings is not known; null works")
    there = [n for n, m in policy.pipeline.components.items() if n.startswith("text_encoder") and m is not None]
    init: Any = settings.init
    config = LoraConfig(
        r=settings.rank, lora_alpha=settings.alpha, target_modules=settings.targets, init_lora_weights=init
    )
    for encoder in settings.encoders:
        if encoder not in there:
            raise ConfigError(f"model.text_lora.encoders: {name} has no '{encoder}'; {nearest(encoder, there)}")
        network = getattr(policy.pipeline, encoder)
        try:
            network.add_adapter(config)
        except ValueError as error:
            raise ConfigError(f"model.text_lora.targets: {settings.targets} match nothing: {error}") from error
        cast_training_params(network, dtype=torch.float32)
        policy.companions[encoder] = network
    policy.lora, policy.encoder.trained = True, True
    for encoder in there:
        to_device(getattr(policy.pipeline, encoder), policy.device)


def encode_again(policy: Any, calls: list[dict[str, Any]], copies: Sequence[int], prompts: Sequence[str]) -> None:
    """Put what the present text encoders make of prompts [N] into the denoiser's calls, with gradients."""
    embedded = policy.encoder.embed(prompts)
    empty = policy.encoder.embed([""] * len(prompts), negative=True) if max(copies) == 2 else {}
    for call, count in zip(calls, copies, strict=True):
        for argument, name in policy.family.text_inputs.items():
            value = torch.cat([empty[name], embedded[name]]) if count == 2 else embedded[name]
            *outer, key = argument.split(".")
            target = call
            for part in outer:
                target = target[part]
            target[key] = value.to(target[key].dtype)
