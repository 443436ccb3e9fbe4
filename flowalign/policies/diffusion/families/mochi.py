"""Mochi."""

from collections.abc import Sequence
from typing import Any

from diffusers import DiffusionPipeline, SchedulerMixin
from torch import Tensor

from flowalign.policies.diffusion.families.base import JOINT_ATTENTION, MaskedEncoding, option
from flowalign.policies.diffusion.families.latents import VideoVAE


class Mochi(VideoVAE, MaskedEncoding):
    """Mochi 1: videos; its noise levels rise, and the network predicts x0 - noise."""

    name = "mochi"
    pipelines = ("MochiPipeline",)
    # which the blocks name attn1
    lora_targets = tuple(name.replace("attn.", "attn1.") for name in JOINT_ATTENTION)
    # the text stream ends in the last block
    dead_ends = ("transformer_blocks.-1.attn1.add_q_proj",)

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        return {"tokenizer": option(options, 256)}

    def sigmas(self, scheduler: SchedulerMixin) -> Tensor:
        return 1 - super().sigmas(scheduler)

    def velocity(self, outputs: Sequence[Any], copies: Sequence[int], guidance: float) -> Tensor:
        return super().velocity([output.float() for output in outputs], copies, guidance)

    def flow_velocity(self, output: Tensor, x: Tensor, sigma: Tensor, scheduler: SchedulerMixin) -> Tensor:
        return -output

    @staticmethod
    def _statistics(pipeline: DiffusionPipeline, like: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = VideoVAE._statistics(pipeline, like)
        return mean, std / pipeline.vae.config.scaling_factor
