"""Model families: the little that differs between diffusers pipelines, one short class each."""

import torch

from flowalign import registry
from flowalign.errors import ConfigError, FlowalignError
from flowalign.policies.diffusion.families.base import Family

CONDITIONING = ("image_encoder", "connectors", "duration_embedder", "vision_language_encoder")
"""Parts of pipelines, besides text encoders, that make what the denoiser is called with; they stay on the device."""


def family_of(pipeline_class: str) -> Family:
    """The family a pipeline class belongs to."""
    families: list[type[Family]] = [registry.resolve("models", name) for name in registry.names("models")]
    for family in families:
        if pipeline_class in family.pipelines:
            return family()
    known = ", ".join(name for family in families for name in family.pipelines)
    raise FlowalignError(
        f"no model family knows the pipeline {pipeline_class}; supported: {known}. "
        "A new one is a subclass of flowalign.policies.diffusion.families.Family (docs/models.md, 'Another family')"
    )


def check_adapters(pipeline_class: str) -> None:
    """Refuse a LoRA where diffusers' class of the network takes none.

    Raises:
        ConfigError: says what works.
    """
    if not family_of(pipeline_class).lora_targets:
        raise ConfigError(
            f"model.lora: diffusers has no adapters for the network of {pipeline_class}; null trains all weights"
        )


def to_device(module: torch.nn.Module | None, device: torch.device | str) -> None:
    """Move a pipeline component that may be absent, or quantised by bitsandbytes, which stays where it was loaded."""
    if module is not None and getattr(module, "quantization_method", None) != "bitsandbytes":
        module.to(device)


__all__ = ["CONDITIONING", "Family", "check_adapters", "family_of", "to_device"]
