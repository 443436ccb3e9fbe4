"""GLM-Image's processor for a tiny pipeline."""

from typing import Any

from transformers import GlmImageProcessor


class TinyGlmImageProcessor(GlmImageProcessor):
    """With any tokenizer, and a preview of one token: the model's own has 256, which take a tiny one a second."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, **settings: Any) -> None:
        tokenizer.image_token, tokenizer.grid_bos_token, tokenizer.grid_eos_token = "<|image|>", "<sop>", "<eop>"
        super().__init__(image_processor, tokenizer, **settings)

    def _get_target_shape(self, height: int, width: int) -> tuple[int, int, int, int]:
        token_height, token_width, *_ = super()._get_target_shape(height, width)
        return token_height, token_width, 1, 1
