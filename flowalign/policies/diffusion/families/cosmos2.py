"""Cosmos-Predict2."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from diffusers import DiffusionPipeline, ModelMixin, SchedulerMixin
from diffusers.utils import BaseOutput
from torch import Tensor

from flowalign.errors import ConfigError
from flowalign.policies.diffusion.families.base import ATTENTION, Encoded, option
from flowalign.policies.diffusion.families.guidance import TrueGuidance
from flowalign.policies.diffusion.families.latents import OneFrame


class Cosmos2(TrueGuidance, OneFrame):
    """Cosmos-Predict2 (arXiv 2501.03575): text to image, by Wan's VAE.

    Its loop holds EDM's x = x0 + k * noise (arXiv 2206.00364): a flow's x times 1 + k, at the level k / (1 + k). There
    EDM's c_in makes the network's input the flow's x, and c_skip and c_out its output the flow's velocity.
    """

    name = "cosmos2"
    pipelines = ("Cosmos2TextToImagePipeline",)
    package = "cosmos_guardrail"
    lora_targets = ATTENTION
    shared = ("padding_mask",)
    outputs: deque[Tensor] = deque(maxlen=2)
    scale_asked: float = 1.0

    def check(self, pipeline: DiffusionPipeline) -> None:
        pipeline.image_processor = pipeline.video_processor
        # diffusers' last step stays at the last noise level, 0.002; the authors' goes to the predicted picture
        pipeline.scheduler.register_to_config(final_sigmas_type="zero")

    def multiple(self, pipeline: DiffusionPipeline) -> int:
        return 16

    def positions(self, denoiser: ModelMixin) -> int:
        sizes = zip(denoiser.config.max_size, denoiser.config.patch_size, strict=True)
        return max(size // patch for size, patch in sizes)

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        embeds, _ = pipeline.encode_prompt(list(prompts), do_classifier_free_guidance=False, **options)
        return {"prompt_embeds": embeds}

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        return {"tokenizer": option(options, 512)}

    def arguments(self, guidance: float) -> dict[str, Any]:
        if 1 < guidance <= 2:
            raise ConfigError(
                f"guidance {guidance:g}: Cosmos2TextToImagePipeline guides above 2 only (its own guidance_scale, one "
                "less, above 1); 1 samples without"
            )
        # the pipeline's is the weight of (positive - negative) on top of the positive prediction
        return {"guidance_scale": guidance - 1}

    def call(self, pipeline: DiffusionPipeline, **arguments: Any) -> BaseOutput:
        if "latents" in arguments:
            arguments["latents"] = arguments["latents"] / pipeline.scheduler.config.sigma_max
        self.outputs, self.scale_asked = deque(maxlen=2), arguments["guidance_scale"] + 1
        hook = pipeline.transformer.register_forward_hook(lambda module, _, output: self.outputs.append(output[0]))
        try:
            output: BaseOutput = pipeline(**arguments)
        finally:
            hook.remove()
            # a call without the network leaves its answers
            self.outputs.clear()
        return output

    def handed(self, output: Tensor, sample: Tensor, sigma: Tensor) -> Tensor:
        # not from the pipeline's x0, which is rounded to the network's dtype: divided by a small level little is left
        outputs = list(self.outputs)
        self.outputs.clear()
        return self.velocity(outputs, [1] * len(outputs), self.scale_asked)

    def velocity(self, outputs: Sequence[Any], copies: Sequence[int], guidance: float) -> Tensor:
        return super().velocity([output.float() for output in outputs], copies, guidance)

    def sigmas(self, scheduler: SchedulerMixin) -> Tensor:
        k = super().sigmas(scheduler)
        return k / (1 + k)

    def put_levels(self, scheduler: SchedulerMixin, levels: Tensor) -> None:
        super().put_levels(scheduler, (levels / (1 - levels)).clamp(max=scheduler.config.sigma_max))

    def loop_scale(self, sigma: Tensor) -> Tensor:
        return 1 / (1 - sigma)

    def unpack(self, latents: Tensor, size: Sequence[int]) -> Tensor:
        return latents[:, :, 0]

    def pack(self, latents: Tensor) -> Tensor:
        return latents[:, :, None]
