"""Lumina-Image 2."""

from collections.abc import Sequence
from typing import Any

from diffusers import DiffusionPipeline, ModelMixin
from torch import Tensor

from flowalign.policies.diffusion.families.base import ATTENTION, MaskedEncoding
from flowalign.policies.diffusion.families.guidance import TrueGuidance, rescaling


class Lumina2(TrueGuidance, MaskedEncoding):
    """Lumina-Image 2.0 (arXiv 2503.21758): predicts x0 - noise; guidance rescaled to the norm of the positive call."""

    name = "lumina2"
    pipelines = ("Lumina2Pipeline",)
    rescales = True
    lora_targets = ATTENTION

    def positions(self, denoiser: ModelMixin) -> int | None:
        return int(min(denoiser.config.axes_lens[1:]))

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        # the system prompt before a prompt counts too
        return {}

    def velocity(self, outputs: Sequence[Any], copies: Sequence[int], guidance: float) -> Tensor:
        guided = super().velocity(outputs, copies, guidance)
        if len(outputs) == 2:
            guided = guided * rescaling(outputs[0], guided)
        return -guided
