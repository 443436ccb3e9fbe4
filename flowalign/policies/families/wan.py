"""Wan: videos."""

from collections.abc import Sequence
from typing import Any

from diffusers import DiffusionPipeline

from flowalign.policies.families.base import ATTENTION, Encoded, TrueGuidance, VideoVAE, option, refuse


class Wan(TrueGuidance, VideoVAE):
    """Wan 2.1 and 2.2 text to video (arXiv 2503.20314), of one transformer."""

    pipelines = ("WanPipeline",)
    lora_targets = ATTENTION

    def check(self, pipeline: DiffusionPipeline) -> None:
        if pipeline.config.boundary_ratio is not None:
            raise refuse(pipeline, "it has two transformers, of high and of low noise; only one can be trained as yet")

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        # the length of the pipeline's call, not that of its encode_prompt
        options = {"max_sequence_length": 512} | options
        embeds, _ = pipeline.encode_prompt(list(prompts), do_classifier_free_guidance=False, **options)
        return {"prompt_embeds": embeds}

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        return {"tokenizer": option(options, 512)}
