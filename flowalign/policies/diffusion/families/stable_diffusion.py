"""Stable Diffusion 1.5, 2 and XL: models of DDPM's noise, with epsilon or v-prediction, walked as flows.

DDPM's x = alpha * x0 + sigma * noise, with alpha^2 + sigma^2 = 1, is a flow's x divided by
n = sqrt((1 - s)^2 + s^2) at the level s = sigma / (alpha + sigma). In these coordinates every kernel, completion and
algorithm holds for them as for a flow; `ddim` is DDPO's kernel (arXiv 2305.13301).
"""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import DDIMScheduler, DiffusionPipeline, ModelMixin, SchedulerMixin
from torch import Tensor

from flowalign.policies.diffusion.families.base import ATTENTION, Encoded, Family
from samplers import v_from_epsilon


class StableDiffusion(Family):
    """Stable Diffusion 1.5 and 2. Whatever scheduler the pipeline has, the timesteps are DDIM's, down to x0."""

    name = "stable_diffusion"
    pipelines = ("StableDiffusionPipeline",)
    denoiser = "unet"
    lora_targets = ATTENTION
    middle = "mid_block"
    text_inputs = {"encoder_hidden_states": "prompt_embeds"}

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        embeds, _ = pipeline.encode_prompt(
            list(prompts), num_images_per_prompt=1, do_classifier_free_guidance=False, **options
        )
        return {"prompt_embeds": embeds}

    def width(self, denoiser: ModelMixin) -> int:
        return int(denoiser.config.block_out_channels[-1])

    def scheduler(self, own: SchedulerMixin) -> SchedulerMixin:
        return DDIMScheduler.from_config(own.config, clip_sample=False, set_alpha_to_one=True)

    def sigmas(self, scheduler: SchedulerMixin) -> Tensor:
        return torch.cat([_levels(scheduler)[scheduler.timesteps.cpu()], torch.zeros(1)])

    def put_levels(self, scheduler: SchedulerMixin, levels: Tensor) -> None:
        # a level is the share of the timesteps below it
        last = scheduler.config.num_train_timesteps - 1
        scheduler.timesteps = (levels * last).round().long().to(scheduler.timesteps.device)

    def scale(self, sigma: Tensor) -> Tensor:
        return 1 / torch.hypot(1 - sigma, sigma)

    def flow_velocity(self, output: Tensor, x: Tensor, sigma: Tensor, scheduler: SchedulerMixin) -> Tensor:
        if scheduler.config.prediction_type == "epsilon":
            return v_from_epsilon(x, output.float(), sigma)
        # a v-prediction is alpha * noise - sigma * x0 in DDPM's notation
        scale = self.scale(sigma)
        return scale**2 * (2 * sigma - 1) * x + scale * output.float()

    def error_weight(self, sigma: Tensor, scheduler: SchedulerMixin) -> Tensor:
        # with x given, noise - x0 is (noise - x) / (1 - sigma), and a v-prediction noise / alpha but for constants
        epsilon = (1 - sigma) ** 2
        return epsilon if scheduler.config.prediction_type == "epsilon" else self.scale(sigma) ** -2

    def own_step(
        self, velocity: Tensor, x: Tensor, sigma: Tensor, sigma_next: Tensor, steps: int, scheduler: SchedulerMixin
    ) -> Tensor:
        # a step of DDIMScheduler goes to t - 1000 // steps, wherever the next timestep is
        levels = torch.cat([torch.zeros(1), _levels(scheduler)]).to(sigma.device, non_blocking=True)
        index = torch.searchsorted(levels, sigma)
        # by `take`, since a number to index with would be fetched from the device
        end = levels.take((index - scheduler.config.num_train_timesteps // steps).clamp(min=0))
        # the network takes the state, in DDPM's notation, for one of its own timestep
        moved = (x + velocity * (end - sigma)) * self.scale(end) / self.scale(sigma_next)
        return torch.where(end == sigma_next, velocity, (moved - x) / (sigma_next - sigma))


def _levels(scheduler: SchedulerMixin) -> Tensor:
    """[1000] noise levels of the timesteps."""
    alphas = scheduler.alphas_cumprod.double()
    alpha, sigma = alphas.sqrt(), (1 - alphas).sqrt()
    return (sigma / (alpha + sigma)).float()


class SDXL(StableDiffusion):
    """Stable Diffusion XL (arXiv 2307.01952)."""

    name = "sdxl"
    pipelines = ("StableDiffusionXLPipeline",)
    text_inputs = {"encoder_hidden_states": "prompt_embeds", "added_cond_kwargs.text_embeds": "pooled_prompt_embeds"}

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        embeds, _, pooled, _ = pipeline.encode_prompt(
            list(prompts), num_images_per_prompt=1, do_classifier_free_guidance=False, **options
        )
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

    def encode_negative(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        encoded = self.encode(pipeline, prompts, **options)
        if pipeline.config.force_zeros_for_empty_prompt:
            # as the pipeline does without a negative prompt
            factors = [float(bool(prompt)) for prompt in prompts]
            return {name: [row * k for row, k in zip(rows, factors, strict=True)] for name, rows in encoded.items()}
        return encoded

    def latents(self, pipeline: DiffusionPipeline, pixels: Tensor) -> Tensor:
        _without_overflow(pipeline.vae)
        return super().latents(pipeline, pixels)

    def decode(self, pipeline: DiffusionPipeline, latents: Tensor) -> Tensor:
        _without_overflow(pipeline.vae)
        return super().decode(pipeline, latents)


def _without_overflow(vae: ModelMixin) -> None:
    """Bring a VAE to float32 that overflows in float16, as the pipeline's own call does."""
    if vae.dtype == torch.float16 and vae.config.force_upcast:
        vae.float()
