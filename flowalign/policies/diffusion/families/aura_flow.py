"""AuraFlow."""

from typing import Any

from diffusers import DiffusionPipeline

from flowalign.policies.diffusion.families.base import JOINT_ATTENTION, MaskedEncoding, option


class AuraFlow(MaskedEncoding):
    """AuraFlow 0.3; texts are padded to one length."""

    name = "aura_flow"
    pipelines = ("AuraFlowPipeline",)
    # as diffusers adapts it in its own tests
    lora_targets = (*JOINT_ATTENTION, "linear_1")

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        return {"tokenizer": option(options, 256)}
