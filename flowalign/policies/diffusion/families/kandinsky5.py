"""Kandinsky 5."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModelMixin
from torch import Tensor
from torch.nn.functional import pad

from flowalign.errors import ConfigError
from flowalign.policies.diffusion.families.base import Encoded, NetworkInput
from flowalign.policies.diffusion.families.guidance import TrueGuidance
from flowalign.policies.diffusion.families.latents import Video


class Kandinsky5(TrueGuidance):
    """Latents travel as [B, F, H, W, C], and room for a first frame stands beside their channels."""

    lora_targets = tuple(
        f"{kind}_attention.{part}"
        for kind in ("self", "cross")
        for part in ("to_query", "to_key", "to_value", "out_layer")
    )
    shared = ("visual_rope_pos", "text_rope_pos", "scale_factor", "sta_mask")
    extra_axis = 4
    one_each = True
    # diffusers rounds rotated queries and keys to bfloat16, whatever the network's dtype
    tolerance = 1e-3
    unpadded = True

    def check(self, pipeline: DiffusionPipeline) -> None:
        pipeline.transformer.time_embeddings.register_forward_pre_hook(_frequencies_there)

    def channels(self, denoiser: ModelMixin) -> int:
        return int(denoiser.config.in_visual_dim)

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        words, text, _ = pipeline.encode_prompt(list(prompts), **options)
        return {"prompt_embeds_qwen": words, "prompt_embeds_clip": text}

    def stack(self, rows: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        ends = torch.arange(len(rows) + 1, dtype=torch.int32) * len(rows[0]["prompt_embeds_qwen"])
        return super().stack(rows) | {"prompt_cu_seqlens": ends}

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        # the template around a prompt counts too
        return {}

    def unpack(self, latents: Tensor, size: Sequence[int]) -> Tensor:
        return latents.movedim(4, 1)

    def pack(self, latents: Tensor) -> Tensor:
        return latents.movedim(1, 4)


class Kandinsky5Image(Kandinsky5):
    """Kandinsky 5, text to image, as videos of one frame, in the pipeline's own sizes."""

    name = "kandinsky5_image"
    pipelines = ("Kandinsky5T2IPipeline",)

    def check_size(self, pipeline: DiffusionPipeline, call: dict[str, Any]) -> None:
        size = call.get("width", 1024), call.get("height", 1024)
        if size not in pipeline.resolutions:
            name = type(pipeline).__name__
            works = ", ".join(f"{width}x{height}" for width, height in pipeline.resolutions)
            raise ConfigError(f"{name} cannot make width {size[0]} with height {size[1]}; {works} work")

    def latents(self, pipeline: DiffusionPipeline, pixels: Tensor) -> Tensor:
        return super().latents(pipeline, pixels)[:, :, None]

    def decode(self, pipeline: DiffusionPipeline, latents: Tensor) -> Tensor:
        return super().decode(pipeline, latents[:, :, 0])


class Kandinsky5ImageEdit(Kandinsky5Image):
    """Kandinsky 5, picture to picture: the source stands beside the channels, and the text encoder sees it too."""

    name = "kandinsky5_edit"
    pipelines = ("Kandinsky5I2IPipeline",)
    images = (1, 1)
    encodes_images = True


class Kandinsky5Video(Kandinsky5, Video):
    """Kandinsky 5, text to video."""

    name = "kandinsky5_video"
    pipelines = ("Kandinsky5T2VPipeline",)


class Kandinsky5ImageToVideo(Kandinsky5Video):
    """Kandinsky 5, image to video: the first frame is given, with all its channels, and the others are sampled."""

    name = "kandinsky5_i2v"
    pipelines = ("Kandinsky5I2VPipeline",)
    images = (1, 1)
    sampled: int

    def check(self, pipeline: DiffusionPipeline) -> None:
        super().check(pipeline)
        self.sampled = self.channels(pipeline.transformer)

    def check_size(self, pipeline: DiffusionPipeline, call: dict[str, Any]) -> None:
        super().check_size(pipeline, call)
        # the pipeline evens the first four frames of the latents out with those after
        fewest = 4 * pipeline.vae_scale_factor_temporal + 1
        if call.get("num_frames", fewest) < fewest:
            raise ConfigError(f"{type(pipeline).__name__} cannot make fewer frames than num_frames {fewest}")

    def extra_input(self, first_input: Any, loop_shape: Sequence[int]) -> Tensor | None:
        return first_input[:, :1]

    def first_frames(self, extra: Any) -> Tensor | None:
        return self.unpack(extra[..., : self.sampled], ())

    def network_input(self, latents: Tensor, extra: Any) -> NetworkInput:
        return torch.cat([extra, pad(latents, (0, extra.shape[4] - self.sampled))], 1)

    def predicted(self, output: Tensor, count: int) -> Tensor:
        return output[:, -count:]

    def decode(self, pipeline: DiffusionPipeline, latents: Tensor) -> Tensor:
        # each by itself: the statistics of the later frames are taken over a whole batch
        even = [pipeline.normalize_first_frame(self.pack(video)) for video in latents.split(1)]
        return super().decode(pipeline, self.unpack(torch.cat(even), ()))


def _frequencies_there(module: ModelMixin, inputs: tuple[Tensor]) -> None:
    """Put an embedding's frequencies where the times are; diffusers leaves them on the host, and sends them anew."""
    module.freqs = module.freqs.to(inputs[0].device, non_blocking=True)
