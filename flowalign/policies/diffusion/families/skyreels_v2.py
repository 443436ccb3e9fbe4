"""SkyReels-V2."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModelMixin
from torch import Tensor

from flowalign.errors import ConfigError
from flowalign.policies.diffusion.families.wan import Wan

FRAMES = 97
"""Frames of a call of the diffusion forcing pipeline that names no number."""
LONGEST = 10**6
"""Frames up to which it makes a video at once, and not by windows that overlap."""


class SkyReelsV2(Wan):
    """SkyReels-V2 text to video: Wan's layout, on its scheduler's levels by steps of first order."""

    name = "skyreels_v2"
    pipelines = ("SkyReelsV2Pipeline",)
    divides_tokens = False

    def networks(self, pipeline: DiffusionPipeline) -> dict[str, Any]:
        return {self.denoiser: pipeline.transformer}


class SkyReelsV2DiffusionForcing(SkyReelsV2):
    """SkyReels-V2's diffusion forcing (arXiv 2504.13074): each frame has a noise level of its own.

    In chunks a video is made causally: frames attend to their own chunk and to those before it, which are clean
    (`ar_step` as large as the number of steps). As a whole all frames have one level and attend to each other.
    """

    name = "skyreels_v2_df"
    pipelines = ("SkyReelsV2DiffusionForcingPipeline",)
    causal = True
    block = 1
    """Frames of latents of a chunk of the last call; 1: all frames see each other."""

    @staticmethod
    def frames(pipeline: DiffusionPipeline, call: dict[str, Any]) -> int:
        """Frames of the latents that the pipeline's call with these arguments makes."""
        return (int(call.get("num_frames", FRAMES)) - 1) // int(pipeline.vae_scale_factor_temporal) + 1

    def check_size(self, pipeline: DiffusionPipeline, call: dict[str, Any]) -> None:
        super().check_size(pipeline, call)
        frames, chunks = self.frames(pipeline, call), call.get("chunks", 1)
        # chunks of one frame are not masked by diffusers' network
        works = [count for count in range(1, frames // 2 + 1) if frames % count == 0] or [1]
        if chunks not in works:
            raise ConfigError(
                f"{type(pipeline).__name__} cannot make chunks {chunks} of {frames} frames of latents; "
                f"{' or '.join(map(str, works))} would work"
            )

    def call(self, pipeline: DiffusionPipeline, **arguments: Any) -> Any:
        chunks, steps = arguments.pop("chunks", 1), arguments["num_inference_steps"]
        frames = self.frames(pipeline, arguments)
        whole = pipeline.scheduler
        pipeline.scheduler = each = FrameSchedulers(whole)
        in_chunks = {"ar_step": steps, "causal_block_size": frames // chunks}
        order = in_chunks if chunks > 1 else {"ar_step": 0, "causal_block_size": 1}
        # embeddings stand for the prompt, which the call must be given all the same
        arguments |= {"prompt": None, "base_num_frames": LONGEST}
        with own_block(pipeline.transformer):
            output = pipeline(**arguments, **order)
            self.block = pipeline.transformer.config.num_frame_per_block
        latents = torch.stack([frame.start for frame in each.frames], 2)
        for timestep in whole.timesteps.repeat(chunks):
            whole.step(torch.zeros_like(latents), timestep, latents)
        return output

    def noted(self, pipeline: DiffusionPipeline) -> dict[str, Any]:
        return {"num_frame_per_block": self.block}

    @contextmanager
    def ready(self, denoiser: ModelMixin, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with own_block(denoiser):
            denoiser._set_ar_attention(call.pop("num_frame_per_block"))
            yield call


@contextmanager
def own_block(network: ModelMixin) -> Iterator[None]:
    """Context after which a network's configuration, which is saved with it, has the chunk that it came with."""
    own = network.config.num_frame_per_block
    try:
        yield
    finally:
        network._set_ar_attention(own)


class FrameSchedulers:
    """Takes the place of a scheduler of which the pipeline has a copy for each frame, and steps none of them.

    Args:
        whole: the scheduler of all frames.
    """

    def __init__(self, whole: object) -> None:
        self.whole = whole
        self.frames: list[FrameScheduler] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.whole, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "FrameScheduler":
        self.frames.append(FrameScheduler())
        return self.frames[-1]


class FrameScheduler:
    """A frame's: stays at its start noise."""

    start: Tensor

    def set_timesteps(self, steps: int, device: object) -> None:
        """Nothing, since it makes no step."""

    def step(self, model_output: Tensor, timestep: Tensor, sample: Tensor, **_: object) -> Sequence[Tensor]:
        self.start = sample
        return (sample,)
