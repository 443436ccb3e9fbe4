"""Stable Audio 3: sounds without pictures."""

from collections.abc import Sequence
from typing import Any

from diffusers import DiffusionPipeline, ModelMixin
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from flowalign.policies.diffusion.families.base import Encoded, Family
from rewards import Sound

LONGEST = 256
"""Tokens of a prompt that the pipeline reads."""


class StableAudio3(Family):
    """Stable Audio 3 (arXiv 2605.17991): latents [B, C, L] of sounds. diffusers has no adapters for its network.

    A sound ends with its last latent, less than a tenth of a second after its `duration`. The distilled release's own
    sampler, which draws all noise anew in each step, is the kernel `cps` with `eta: 1`.
    """

    name = "stable_audio3"
    pipelines = ("StableAudio3Pipeline",)
    makes_sound = True
    lora_targets = ()

    def untrained(self, network: ModelMixin) -> tuple[str, ...]:
        # of inpainting alone
        return tuple(f"transformer_blocks.{i}.to_local_embed" for i in range(network.config.depth))

    def multiple(self, pipeline: DiffusionPipeline) -> int:
        return 1

    def channels(self, denoiser: ModelMixin) -> int:
        return int(denoiser.config.io_channels)

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        texts = [_cut(pipeline.tokenizer, prompt) for prompt in prompts]
        embeds, mask = pipeline.encode_prompt(texts, num_waveforms_per_prompt=1, **options)
        return {"prompt_embeds": embeds, "encoder_attention_mask": mask}

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        return {"tokenizer": LONGEST}

    def decode(self, pipeline: DiffusionPipeline, latents: Tensor) -> Tensor:
        return pipeline.vae.decode(latents.to(pipeline.vae.dtype), return_dict=False)[0]

    def pictures(self, pipeline: DiffusionPipeline, pixels: Tensor) -> list[Any]:
        waves = pixels.clamp(-1, 1).cpu().numpy()
        return [Sound(wave, pipeline.vae.config.sampling_rate) for wave in waves]


def _cut(tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """The beginning of a prompt that is too long; diffusers would compare its tokens on the host with the device's."""
    limit = min(tokenizer.model_max_length, LONGEST)
    if len(tokenizer(prompt).input_ids) < limit:
        return prompt
    kept = tokenizer(prompt, truncation=True, max_length=limit - 1).input_ids
    return str(tokenizer.decode(kept, skip_special_tokens=True))
