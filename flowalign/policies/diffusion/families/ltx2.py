"""LTX-2: video with sound."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline
from PIL.Image import Image
from torch import Tensor

from flowalign.errors import ConfigError
from flowalign.policies.diffusion.families.ltx import LTX, LTXImageToVideo
from rewards import Sound


class LTX2(LTX):
    """LTX-2: its video is trained; its sound is sampled along by the ODE and replayed as it was at each step.

    `omni_nft` trains both. Guidance is by the text alone, without the pipeline's further terms and rescaling.
    """

    name = "ltx2"
    pipelines = ("LTX2Pipeline",)
    samples_sound = True
    lora_targets = tuple(f"{part}.{name}" for part in ("attn1", "attn2") for name in LTX.lora_targets)
    # the sound that comes out is not trained
    dead_ends = (
        "transformer_blocks.-1.video_to_audio_attn",
        "transformer_blocks.-1.audio_ff",
        "audio_proj_out",
        "audio_scale_shift_table",
    )

    def check(self, pipeline: DiffusionPipeline) -> None:
        super().check(pipeline)
        if pipeline.tokenizer is not None:
            # the encoding leaves it so, and the pipeline's call reads it, also where nothing was encoded before
            pipeline.tokenizer.padding_side = "left"

    def size(self, pipeline: DiffusionPipeline, call: dict[str, Any]) -> tuple[int, ...]:
        if "num_frames" not in call:
            raise ConfigError("LTX-2 has no usual number of frames; set num_frames")
        return super().size(pipeline, call)

    @torch.no_grad()
    def sounds(self, pipeline: DiffusionPipeline, latents: Tensor) -> list[Sound]:
        vae, vocoder = (module.to(latents.device) for module in (pipeline.audio_vae, pipeline.vocoder))
        waves = vocoder(vae.decode(latents.to(vae.dtype), return_dict=False)[0]).float().cpu().numpy()
        return [Sound(wave, vocoder.config.output_sampling_rate) for wave in waves]

    def sound_tokens(self, pipeline: DiffusionPipeline, latents: Tensor) -> Tensor:
        vae, packed = pipeline.audio_vae, latents.transpose(1, 2).flatten(2, 3)
        mean, std = vae.latents_mean.to(packed), vae.latents_std.to(packed)
        return (packed - mean) / std

    def arguments(self, guidance: float) -> dict[str, Any]:
        alike = ("guidance_scale", "audio_guidance_scale")
        rest = {"stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0}
        return dict.fromkeys(alike, guidance) | rest | dict.fromkeys([f"audio_{name}" for name in rest])


class LTX2ImageToVideo(LTXImageToVideo, LTX2):
    """LTX-2, picture to video and sound; the picture enters as it is, without the pipeline's H.264 compression."""

    name = "ltx2_i2v"
    pipelines = ("LTX2ImageToVideoPipeline",)

    def sources(self, images: Sequence[Image], mask: Image | None, count: int, call: dict[str, Any]) -> dict[str, Any]:
        return super().sources(images, mask, count, call) | {"image_crf": 0}
