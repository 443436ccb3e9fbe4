"""Ideogram 4."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.models.transformers.transformer_ideogram4 import LLM_TOKEN_INDICATOR, OUTPUT_IMAGE_INDICATOR
from diffusers.utils import BaseOutput
from torch import Tensor
from torch.nn.functional import pad

from flowalign.policies.diffusion.conditions import standing_in
from flowalign.policies.diffusion.families.base import ATTENTION, Encoded, NetworkInput, option
from flowalign.policies.diffusion.families.flux2 import Flux2Latents
from flowalign.policies.diffusion.families.guidance import TrueGuidance

TEXT = "encoder_hidden_states"


class Ideogram4(Flux2Latents, TrueGuidance):
    """Ideogram 4: FLUX.2's VAE; a frozen network without a prompt answers for the other side of guidance.

    Texts stand before pictures in one sequence of tokens, and the networks predict x0 - noise.
    """

    name = "ideogram4"
    pipelines = ("Ideogram4Pipeline",)
    guide = "unconditional_transformer"
    guidance = "two calls a step, the second of a frozen network"
    lora_targets = ATTENTION
    images = (0, 0)
    divides_tokens = False

    def check(self, pipeline: DiffusionPipeline) -> None:
        pipeline.default_sample_size = 2048 // pipeline.vae_scale_factor
        encode = pipeline.encode_prompt

        @functools.wraps(encode)
        def encode_prompt(
            prompt: list[str] | list[Tensor],
            grid_h: int,
            grid_w: int,
            max_sequence_length: int,
            device: torch.device | None,
        ) -> Sequence[Tensor]:
            # the pipeline's call takes no embeddings: those of texts stand in their place
            texts = [text for text in prompt if isinstance(text, Tensor)]
            if not texts:
                embedded: Sequence[Tensor] = encode(prompt, grid_h, grid_w, max_sequence_length, device)
                return embedded
            lengths, after = [len(text) for text in texts], grid_h * grid_w
            embeds = [pad(text, [0, 0, max_sequence_length - len(text), after]) for text in texts]
            ids = pipeline._prepare_ids(lengths, grid_h, grid_w, max_sequence_length, device)
            return (torch.stack(embeds), *ids)

        pipeline.encode_prompt = encode_prompt

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        longest = option(options, 2048)
        embeds, _, _, indicator = pipeline.encode_prompt(list(prompts), 1, 1, longest, options.get("device"))
        texts = indicator == LLM_TOKEN_INDICATOR
        return {"prompt_embeds": [row[text] for row, text in zip(embeds, texts, strict=True)]}

    def stack(self, rows: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        texts = [row["prompt_embeds"] for row in rows]
        return {"prompt": texts, "max_sequence_length": max(map(len, texts))}

    def negative(self, guidance: float) -> bool:
        return False

    def arguments(self, guidance: float) -> dict[str, Any]:
        return {"guidance_scale": guidance, "guidance_schedule": None}

    def arguments_by_step(self, scales: Sequence[float]) -> dict[str, Any]:
        return {"guidance_scale": None, "guidance_schedule": list(scales)}

    def call(self, pipeline: DiffusionPipeline, **arguments: Any) -> BaseOutput:
        # which asks the network without a prompt whatever the scale
        unasked = [pipeline.unconditional_transformer] if arguments["guidance_scale"] == 1 else []
        with standing_in(unasked, lambda own: _nothing):
            output: BaseOutput = pipeline(**arguments)
        return output

    def extra_input(self, first_input: NetworkInput, loop_shape: Sequence[int]) -> None:
        return None

    def kept(self, name: str, value: Tensor, loop_shape: Sequence[int]) -> Tensor:
        # the places of the picture have no features of texts
        return value[:, : value.shape[1] - loop_shape[1]].clone() if name == TEXT else value

    def ask(self, network: Callable[..., Sequence[Any]], states: NetworkInput, call: dict[str, Any]) -> Sequence[Any]:
        assert isinstance(states, Tensor)
        pictures = call["indicator"] == OUTPUT_IMAGE_INDICATOR
        count, tokens = states.shape[1], pictures.shape[1]
        # a text's length moves the picture's tokens
        places = pictures.int().argmax(1, keepdim=True) + torch.arange(count, device=states.device)
        places = places[:, :, None].expand_as(states)
        whole = states.new_zeros(len(states), tokens, states.shape[2]).scatter(1, places, states)
        text = pad(call[TEXT], [0, 0, 0, tokens - call[TEXT].shape[1]])
        return (network(whole, **call | {TEXT: text})[0].gather(1, places),)

    def velocity(self, outputs: Sequence[Any], copies: Sequence[int], guidance: float) -> Tensor:
        return -super().velocity([output.float() for output in outputs], copies, guidance)

    def latents(self, pipeline: DiffusionPipeline, pixels: Tensor) -> Tensor:
        latents = pipeline.vae.encode(pixels.to(pipeline.vae.dtype)).latent_dist.mode()
        patches = latents.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
        latents = patches.permute(0, 3, 5, 1, 2, 4).flatten(1, 3)
        mean, std = self._statistics(pipeline, latents)
        return (latents - mean) / std

    def decode(self, pipeline: DiffusionPipeline, latents: Tensor) -> Tensor:
        mean, std = self._statistics(pipeline, latents)
        patches = (latents * std + mean).unflatten(1, (2, 2, -1))
        latents = patches.permute(0, 3, 4, 1, 5, 2).flatten(4, 5).flatten(2, 3)
        return pipeline.vae.decode(latents.to(pipeline.vae.dtype), return_dict=False)[0]


def _nothing(hidden_states: Tensor, **_: object) -> tuple[Tensor]:
    return (torch.zeros_like(hidden_states),)
