"""CogView4."""

from collections.abc import Sequence
from typing import Any

from diffusers import DiffusionPipeline

from flowalign.policies.families.base import ATTENTION, Encoded, TrueGuidance, option


class CogView4(TrueGuidance):
    """CogView4 6B. Its text has no mask, so all prompts are padded to one length: `max_sequence_length`, 128 tokens.

    The pipeline pads to the longest prompt of a batch, by which a picture would depend on the batch it came in.
    """

    pipelines = ("CogView4Pipeline",)
    lora_targets = ATTENTION

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        rows = []
        for prompt in prompts:
            # the empty one, which all samples share, is as short as the pipeline makes it
            settings = {"max_length": option(options, 128) if prompt else 16, "padding": "max_length"}
            ids = pipeline.tokenizer(prompt, truncation=True, return_tensors="pt", **settings).input_ids
            outputs = pipeline.text_encoder(ids.to(options["device"]), output_hidden_states=True)
            rows.append(outputs.hidden_states[-2][0])
        return {"prompt_embeds": rows}

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        return {"tokenizer": option(options, 128)}
