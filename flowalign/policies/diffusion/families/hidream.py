"""HiDream-I1."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.models.transformers.transformer_hidream_image import MOEFeedForwardSwiGLU
from torch import Tensor

from flowalign.errors import ConfigError
from flowalign.policies.diffusion.families.base import Encoded, Family, NetworkInput, option

TEXT = "encoder_hidden_states_llama3"


def experts(layer: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """What the experts of a layer make of tokens, with gradients.

    Args:
        x: [N, D] tokens.
        chosen: [N * K] number of each token's K experts, token after token.
        weights: [N * K, 1] of those experts.
    """
    made = torch.zeros_like(x)
    counts = chosen.bincount(minlength=len(layer.experts)).tolist()
    for expert, places in zip(layer.experts, chosen.argsort(stable=True).split(counts), strict=True):
        rows = places // layer.num_activated_experts
        made = made.index_add(0, rows, (expert(x[rows]) * weights[places]).to(made.dtype))
    return made


class HiDream(Family):
    """HiDream-I1 (arXiv 2505.22705): four text encoders, every layer of Llama; a token asks few of its experts."""

    name = "hidream"
    pipelines = ("HiDreamImagePipeline",)
    lora_targets = ("to_q", "to_k", "to_v", "to_out", "to_q_t", "to_k_t", "to_v_t", "to_out_t")

    def check(self, pipeline: DiffusionPipeline) -> None:
        # outside of training mode diffusers' class asks the experts without gradients, which would be lost in silence
        MOEFeedForwardSwiGLU.moe_infer = experts

    def multiple(self, pipeline: DiffusionPipeline) -> int:
        return 2 * int(pipeline.vae_scale_factor)

    def check_size(self, pipeline: DiffusionPipeline, call: dict[str, Any]) -> None:
        super().check_size(pipeline, call)
        side, step = pipeline.default_sample_size * pipeline.vae_scale_factor, self.multiple(pipeline)
        size = [call.get(name) or side for name in ("height", "width")]
        scale = math.sqrt(side**2 / math.prod(size))
        made = [int(length * scale // step * step) for length in size]
        if made != size:
            raise ConfigError(
                f"{type(pipeline).__name__} brings every size to the area of {side} x {side}, and would make "
                f"{made[0]} x {made[1]} (height x width) of {size[0]} x {size[1]}; {side} x {side} works"
            )

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        t5, _, llama, _, pooled, _ = pipeline.encode_prompt(list(prompts), do_classifier_free_guidance=False, **options)
        return {"prompt_embeds_t5": t5, "prompt_embeds_llama3": llama.transpose(0, 1), "pooled_prompt_embeds": pooled}

    def stack(self, rows: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        stacked = super().stack(rows)
        return stacked | {"prompt_embeds_llama3": torch.stack([row["prompt_embeds_llama3"] for row in rows], 1)}

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        return super().token_limits(pipeline) | dict.fromkeys(("tokenizer_3", "tokenizer_4"), option(options, 128))

    def kept(self, name: str, value: Tensor, loop_shape: Sequence[int]) -> Tensor:
        # a layer after the other, each of all samples
        return value.transpose(0, 1) if name == TEXT else value

    def ask(self, network: Callable[..., Sequence[Any]], states: NetworkInput, call: dict[str, Any]) -> Sequence[Any]:
        return network(states, **call | {TEXT: call[TEXT].transpose(0, 1)})

    def velocity(self, outputs: Sequence[Any], copies: Sequence[int], guidance: float) -> Tensor:
        return super().velocity([-output for output in outputs], copies, guidance)
