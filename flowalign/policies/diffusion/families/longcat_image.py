"""LongCat-Image."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.pipelines.longcat_image import pipeline_longcat_image_edit
from torch import Tensor

from flowalign.errors import ConfigError
from flowalign.policies.diffusion.families.base import JOINT_ATTENTION, Encoded
from flowalign.policies.diffusion.families.guidance import TrueGuidance
from flowalign.policies.diffusion.families.latents import Packed


class LongCat(Packed, TrueGuidance):
    """What text to image and edits have in common."""

    lora_targets = JOINT_ATTENTION
    shared = ("txt_ids", "img_ids")

    def check(self, pipeline: DiffusionPipeline) -> None:
        encode = pipeline.encode_prompt

        @functools.wraps(encode)
        def encode_prompt(prompt: Any = None, prompt_embeds: Tensor | None = None, **more: Any) -> Any:
            # which counts prompts where it is given embeddings too
            prompt = prompt if prompt_embeds is None else [""] * len(prompt_embeds)
            return encode(prompt=prompt, prompt_embeds=prompt_embeds, **more)

        pipeline.encode_prompt = encode_prompt

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        # it knows the device by itself
        options = {name: value for name, value in options.items() if name != "device"}
        if unknown := options.keys() - {"image"}:
            raise ConfigError(
                f"model.encode: {type(pipeline).__name__} cuts prompts at {pipeline.tokenizer_max_length} tokens and "
                f"takes no {min(unknown)}; model.encode={{}} works"
            )
        embeds, _ = pipeline.encode_prompt(prompt=list(prompts), **options)
        return {"prompt_embeds": embeds}


class LongCatImage(LongCat):
    """LongCat-Image 6B: guidance rescaled to the norm of the positive call, where it is larger.

    Prompts are not rewritten by its text encoder, as the pipeline's default is.
    """

    name = "longcat_image"
    pipelines = ("LongCatImagePipeline",)
    rescales = True

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        return {"tokenizer": int(pipeline.tokenizer_max_length)}

    def arguments(self, guidance: float) -> dict[str, Any]:
        return super().arguments(guidance) | {"enable_prompt_rewrite": False}

    def velocity(self, outputs: Sequence[Any], copies: Sequence[int], guidance: float) -> Tensor:
        guided = super().velocity(outputs, copies, guidance)
        if len(outputs) == 1:
            return guided
        norms = [torch.norm(velocity, dim=-1, keepdim=True) for velocity in (outputs[0], guided)]
        return guided * (norms[0] / (norms[1] + 1e-8)).clamp(max=1.0)


class LongCatImageEdit(LongCat):
    """LongCat-Image-Edit: the text encoder, too, sees the picture that is edited, at half the size of the result."""

    name = "longcat_image_edit"
    pipelines = ("LongCatImageEditPipeline",)
    images = (1, 1)
    encodes_images = True

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        for text in prompts:
            self._refuse_long(pipeline, text)
        [image] = options.pop("image")
        seen = pipeline.image_processor.resize(image, image.height // 2, image.width // 2)
        # which reads the first of several prompts
        encoded = [super(LongCatImageEdit, self).encode(pipeline, [text], image=seen, **options) for text in prompts]
        return {"prompt_embeds": [row["prompt_embeds"][0] for row in encoded]}

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        # a longer prompt is refused
        return {}

    def _refuse_long(self, pipeline: DiffusionPipeline, text: str) -> None:
        """Refuse a prompt that diffusers fails to cut; words in quotes are read letter by letter."""
        parts = pipeline_longcat_image_edit.split_quotation(text)
        words = [word for part, quoted in parts for word in (part if quoted else [part])]
        count = sum(len(pipeline.tokenizer(word, add_special_tokens=False).input_ids) for word in words)
        most = int(pipeline.tokenizer_max_length)
        if count > most:
            raise ConfigError(
                f"{type(pipeline).__name__} takes prompts of up to {most} tokens, and {text[:60]!r} has {count}; "
                "a shorter one works"
            )

    def call(self, pipeline: DiffusionPipeline, **arguments: Any) -> Any:
        size = arguments.pop("width"), arguments.pop("height")
        module = vars(pipeline_longcat_image_edit)
        of_area = module["calculate_dimensions"]
        # it takes no size, and would bring the picture to a megapixel
        module["calculate_dimensions"] = lambda *_: size
        try:
            return pipeline(**arguments)
        finally:
            module["calculate_dimensions"] = of_area
