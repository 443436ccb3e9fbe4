"""DiT: pictures of a class, without prompts."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.autoencoders.vae import DecoderOutput
from torch import Tensor

from flowalign.errors import ConfigError
from flowalign.policies.diffusion.families.base import Encoded
from flowalign.policies.diffusion.families.stable_diffusion import StableDiffusion

NO_CLASS = 1000
"""The number that stands for no class, in the network's embeddings and in the pipeline's guidance."""


class DiT(StableDiffusion):
    """DiT (arXiv 2212.09748) on ImageNet: a prompt is a class, by its word or its number.

    The network predicts a variance beside the noise, which no sampler here uses. diffusers has no adapters for it.
    """

    name = "dit"
    pipelines = ("DiTPipeline",)
    denoiser = "transformer"
    lora_targets = ()
    middle = "transformer_blocks"
    text_inputs = {}
    unconditional = 1
    example = "0"

    def check(self, pipeline: DiffusionPipeline) -> None:
        pipeline.image_processor = VaeImageProcessor(vae_scale_factor=self.pixels(pipeline))

    def pixels(self, pipeline: DiffusionPipeline) -> int:
        return int(2 ** (len(pipeline.vae.config.block_out_channels) - 1))

    def check_size(self, pipeline: DiffusionPipeline, call: dict[str, Any]) -> None:
        super().check_size(pipeline, call)
        side = pipeline.transformer.config.sample_size * self.pixels(pipeline)
        for name in ("height", "width"):
            if call.get(name, side) != side:
                raise ConfigError(f"{type(pipeline).__name__} cannot make {name} {call[name]}; {side} works")

    def channels(self, denoiser: ModelMixin) -> int:
        return int(denoiser.config.in_channels)

    def width(self, denoiser: ModelMixin) -> int:
        return int(denoiser.config.num_attention_heads * denoiser.config.attention_head_dim)

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        return {"class_labels": [torch.tensor([self._number(pipeline, text)]) for text in prompts]}

    @staticmethod
    def _number(pipeline: DiffusionPipeline, text: str) -> int:
        """The number of a class; an empty text stands for none."""
        numbers = {"": NO_CLASS, **pipeline.labels, **{str(i): i for i in range(NO_CLASS)}}
        if text not in numbers:
            raise ConfigError(
                f"{type(pipeline).__name__} makes pictures of classes, and {text!r} is none that it knows by its word "
                "or number; 'golden retriever' and '207' work"
            )
        return int(numbers[text])

    def stack(self, rows: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {"class_labels": [int(row["class_labels"]) for row in rows]}

    def negative(self, guidance: float) -> bool:
        return False

    def velocity(self, outputs: Sequence[Any], copies: Sequence[int], guidance: float) -> Tensor:
        if copies[0] == 1:
            return outputs[0]
        conditional, unconditional = outputs[0].chunk(2)
        return unconditional + guidance * (conditional - unconditional)

    def call(self, pipeline: DiffusionPipeline, **arguments: Any) -> Any:
        if "latents" in arguments:
            raise ConfigError(f"{type(pipeline).__name__} takes no start noise, and its noise cannot be moved")
        known = {name: value for name, value in arguments.items() if name not in ("height", "width")}
        # it decodes whatever it is asked for
        vars(pipeline.vae)["decode"] = DecoderOutput
        try:
            return pipeline(**known | {"output_type": "pt"})
        finally:
            del vars(pipeline.vae)["decode"]
