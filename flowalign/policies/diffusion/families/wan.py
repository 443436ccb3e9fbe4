"""Wan: videos."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from flowalign.errors import ConfigError
from flowalign.policies.diffusion.families.base import ATTENTION, Encoded, NetworkInput, option
from flowalign.policies.diffusion.families.guidance import TrueGuidance
from flowalign.policies.diffusion.families.latents import VideoVAE

FRAMES = 5
"""Frames of an edit by ChronoEdit."""


class Wan(TrueGuidance, VideoVAE):
    """Wan 2.1 and 2.2 text to video (arXiv 2503.20314); both transformers of Wan 2.2 14B, of high and low noise."""

    name = "wan"
    pipelines = ("WanPipeline",)
    middle = "blocks"
    divides_tokens = True
    lora_targets = ATTENTION

    def networks(self, pipeline: DiffusionPipeline) -> dict[str, Any]:
        both = {} if pipeline.config.boundary_ratio is None else {"transformer_2": pipeline.transformer_2}
        return super().networks(pipeline) | both

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        # the default of the pipeline's call, which differs from its encode_prompt's
        options = {"max_sequence_length": 512} | options
        embeds, _ = pipeline.encode_prompt(list(prompts), do_classifier_free_guidance=False, **options)
        return {"prompt_embeds": embeds}

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        return {"tokenizer": option(options, 512)}


class WanImageToVideo(Wan):
    """Wan 2.1 and 2.2 image to video: the first frame beside the channels, or in the latents' place (Wan 2.2 5B)."""

    name = "wan_i2v"
    pipelines = ("WanImageToVideoPipeline",)
    images = (1, 1)
    replaces: bool
    """Whether the picture is the latents' first frame, and only the others are sampled."""

    def check(self, pipeline: DiffusionPipeline) -> None:
        self.replaces = bool(pipeline.config.expand_timesteps)

    def extra_input(self, first_input: Any, loop_shape: Sequence[int]) -> Tensor | None:
        return first_input[:, :, :1] if self.replaces else super().extra_input(first_input, loop_shape)

    def first_frames(self, extra: Tensor | None) -> Tensor | None:
        return extra if self.replaces else None

    def unpack(self, latents: Tensor, size: Sequence[int]) -> Tensor:
        return latents[:, :, 1:] if self.replaces else latents

    def pack(self, latents: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(latents[:, :, :1]), latents], 2) if self.replaces else latents

    def network_input(self, latents: Tensor, extra: Any) -> NetworkInput:
        if self.replaces:
            return torch.cat([extra, latents[:, :, 1:]], 2)
        return super().network_input(latents, extra)


class ChronoEdit(WanImageToVideo):
    """ChronoEdit (arXiv 2510.04290): a picture edited as a video of five frames, of which the last is the edit.

    Without the pipeline's temporal reasoning, whose frames it drops on the way.
    """

    name = "chrono_edit"
    pipelines = ("ChronoEditPipeline",)
    replaces = False
    divides_tokens = False

    def check(self, pipeline: DiffusionPipeline) -> None:
        pass

    def networks(self, pipeline: DiffusionPipeline) -> dict[str, Any]:
        return {self.denoiser: pipeline.transformer}

    def check_size(self, pipeline: DiffusionPipeline, call: dict[str, Any]) -> None:
        super().check_size(pipeline, call)
        if call.get("num_frames", FRAMES) != FRAMES:
            raise ConfigError(f"{type(pipeline).__name__} cannot make num_frames {call['num_frames']}; {FRAMES} works")


class WanVACE(Wan):
    """Wan VACE (arXiv 2503.07598) as text to video: its control is an empty video, without pictures of reference."""

    name = "wan_vace"
    pipelines = ("WanVACEPipeline",)
    shared = ("control_hidden_states_scale",)
    # its call takes one prompt
    largest_batch = 1
    divides_tokens = False
