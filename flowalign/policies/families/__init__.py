"""Model families: the little that differs between diffusers pipelines, one short class each."""

import torch

from flowalign.errors import FlowalignError
from flowalign.policies.families.base import Family
from flowalign.policies.families.chroma import Chroma
from flowalign.policies.families.flux import Flux
from flowalign.policies.families.flux2 import Flux2, Flux2Klein
from flowalign.policies.families.ltx import LTX
from flowalign.policies.families.lumina2 import Lumina2
from flowalign.policies.families.qwen_image import QwenImage
from flowalign.policies.families.sana import Sana
from flowalign.policies.families.sd3 import SD3
from flowalign.policies.families.stable_diffusion import SDXL, StableDiffusion
from flowalign.policies.families.wan import Wan
from flowalign.policies.families.z_image import ZImage

FAMILIES: tuple[type[Family], ...] = (
    SD3,
    Flux,
    Flux2,
    Flux2Klein,
    QwenImage,
    ZImage,
    Wan,
    LTX,
    Chroma,
    Lumina2,
    Sana,
    StableDiffusion,
    SDXL,
)


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


__all__ = ["FAMILIES", "Family", "family_of", "to_device"]
