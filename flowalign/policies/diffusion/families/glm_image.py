"""GLM-Image: a language model draws the tokens of a picture, which the denoiser then makes."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Generator, Tensor

from flowalign.errors import ConfigError
from flowalign.policies.diffusion.families.base import ATTENTION, Encoded, option
from flowalign.policies.diffusion.families.guidance import TrueGuidance
from flowalign.policies.diffusion.families.latents import NormalisedVAE

KEPT = 4096
"""Most samples whose tokens are kept."""


class GlmImage(NormalisedVAE, TrueGuidance):
    """GLM-Image; the denoiser is trained, and the language model before it stays as it is or is a method's writer.

    A sample's tokens follow from its prompt, seed and size, and are an argument of every step; where the language model
    stays they are drawn once. Texts in quotes are read letter by letter, and their length changes the picture.
    """

    name = "glm_image"
    pipelines = ("GlmImagePipeline",)
    language_model = "vision_language_encoder"
    lora_targets = ATTENTION
    unpadded = True

    def __init__(self) -> None:
        self.tokens: OrderedDict[tuple[str, int, int, int], Tensor] = OrderedDict()
        """[1, N] of each prompt, seed, height and width, on the host"""

    def multiple(self, pipeline: DiffusionPipeline) -> int:
        # a token is 2 x 2 patches
        return 2 * super().multiple(pipeline)

    def check_size(self, pipeline: DiffusionPipeline, call: dict[str, Any]) -> None:
        super().check_size(pipeline, call)
        if not {"height", "width"} <= call.keys():
            raise ConfigError("GLM-Image has no usual size; set height and width")

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        embeds, _ = pipeline.encode_prompt(list(prompts), do_classifier_free_guidance=False, **options)
        return {"prompt_embeds": embeds, "prompt": [torch.tensor(list(text.encode())) for text in prompts]}

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        return {"tokenizer": option(options, 2048)}

    def stack(self, rows: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        texts = [bytes(row["prompt"].tolist()).decode() for row in rows]
        return {"prompt_embeds": torch.stack([row["prompt_embeds"] for row in rows]), "prompt": texts}

    def call(self, pipeline: DiffusionPipeline, **arguments: Any) -> Any:
        prompts, sources = arguments.pop("prompt"), arguments["generator"]
        arguments.pop("negative_prompt", None)
        if "prior_token_ids" not in arguments:
            size = arguments["height"], arguments["width"]
            drawn = [self._drawn(pipeline, text, source, *size) for text, source in zip(prompts, sources, strict=True)]
            arguments["prior_token_ids"] = torch.cat(drawn)
        # it would refuse a negative prompt of another length than the prompt, of which its own call makes no difference
        vars(pipeline)["check_inputs"] = lambda *_: None
        try:
            return pipeline(**arguments)
        finally:
            del vars(pipeline)["check_inputs"]

    def _drawn(self, pipeline: DiffusionPipeline, prompt: str, source: Generator, height: int, width: int) -> Tensor:
        """[1, N] tokens of a sample, drawn as in the pipeline's call for it alone."""
        key, device = (prompt, source.initial_seed(), height, width), pipeline.transformer.device
        network = pipeline.components[self.language_model]
        if any(parameter.requires_grad for parameter in network.parameters()):
            # whose next tokens may be others
            self.tokens.clear()
        if key not in self.tokens:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                tokens, *_ = pipeline.generate_prior_tokens([prompt], height, width, device=device, generator=source)
            self.tokens[key] = tokens.cpu()
        self.tokens.move_to_end(key)
        while len(self.tokens) > KEPT:
            self.tokens.popitem(last=False)
        return self.tokens[key].to(device)
