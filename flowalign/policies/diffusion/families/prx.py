"""PRX, in the latents of a VAE and in pixels."""

from collections.abc import Sequence
from typing import Any

from diffusers import AutoencoderDC, DiffusionPipeline, ModelMixin, SchedulerMixin
from torch import Tensor

from flowalign.policies.diffusion.families.base import MaskedEncoding, refuse

SMALLEST = 0.05
"""Noise level, in the pipeline's own terms, below which it divides by no smaller one."""


class PRX(MaskedEncoding):
    """PRX: text by T5Gemma, latents of FLUX.1's VAE or of a deep compression one. diffusers has no adapters for it."""

    name = "prx"
    pipelines = ("PRXPipeline",)
    lora_targets = ()
    middle = "blocks"
    # with guidance its call fails for several prompts: it gives the network two timesteps, whatever the batch
    largest_batch = 1

    def check(self, pipeline: DiffusionPipeline) -> None:
        if pipeline.vae is None:
            raise refuse(pipeline, "it has no VAE")

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        return {"tokenizer": options.get("tokenizer_max_length") or pipeline.tokenizer.model_max_length}

    def arguments(self, guidance: float) -> dict[str, Any]:
        return super().arguments(guidance) | {"use_resolution_binning": False}

    def channels(self, denoiser: ModelMixin) -> int:
        return int(denoiser.config.in_channels)

    def width(self, denoiser: ModelMixin) -> int:
        return int(denoiser.config.hidden_size)

    def latents(self, pipeline: DiffusionPipeline, pixels: Tensor) -> Tensor:
        if isinstance(pipeline.vae, AutoencoderDC):
            return pipeline.vae.encode(pixels.to(pipeline.vae.dtype)).latent * pipeline.vae.config.scaling_factor
        return super().latents(pipeline, pixels)


class PRXPixel(PRX):
    """PRX in pixels. The network predicts x0, and its noise has a standard deviation k.

    Its x = (1 - t) * x0 + t * k * noise is a flow's x times c = k / (k - (k - 1) * s) at the level s = k * t / c.
    """

    name = "prx_pixel"
    pipelines = ("PRXPixelPipeline",)
    k: float

    def check(self, pipeline: DiffusionPipeline) -> None:
        self.k = float(pipeline.config.noise_scale)

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        return {"tokenizer": int(pipeline.config.prompt_max_tokens)}

    def sigmas(self, scheduler: SchedulerMixin) -> Tensor:
        t = super().sigmas(scheduler)
        return self.k * t / (1 + (self.k - 1) * t)

    def scale(self, sigma: Tensor) -> Tensor:
        return self.k / (self.k - (self.k - 1) * sigma)

    def _t(self, sigma: Tensor) -> Tensor:
        """The level in the pipeline's own terms."""
        return sigma * self.scale(sigma) / self.k

    def handed(self, output: Tensor, sample: Tensor, sigma: Tensor) -> Tensor:
        return sample.float() - output.float() * self._t(sigma).clamp(min=SMALLEST)

    def flow_velocity(self, output: Tensor, x: Tensor, sigma: Tensor, scheduler: SchedulerMixin) -> Tensor:
        # where the pipeline divides by more than its level, its step goes to a cleaner state by that much less
        state, share = x * self.scale(sigma), (self._t(sigma) / SMALLEST).clamp(max=1)
        x0 = state - share * (state - output.float())
        return (x - x0) / sigma

    def velocity(self, outputs: Sequence[Any], copies: Sequence[int], guidance: float) -> Tensor:
        return super().velocity([output.float() for output in outputs], copies, guidance)

    def latents(self, pipeline: DiffusionPipeline, pixels: Tensor) -> Tensor:
        return pixels

    def decode(self, pipeline: DiffusionPipeline, latents: Tensor) -> Tensor:
        return latents
