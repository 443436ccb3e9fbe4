"""GLM-Image's processor for a tiny pipeline."""

from transformers import CLIPTokenizer, GlmImageProcessor

WORDS = {"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"}
"""Tokens that the processor looks for in its tokenizer."""


class TinyGlmImageProcessor(GlmImageProcessor):
    """With any tokenizer, and a preview of one token: the model's own has 256, which take a tiny one a second."""

    def __init__(self, image_processor: object, tokenizer: CLIPTokenizer, **settings: object) -> None:
        for name, word in WORDS.items():
            setattr(tokenizer, name, word)
        super().__init__(image_processor, tokenizer, **settings)

    def _get_target_shape(self, height: int, width: int) -> tuple[int, int, int, int]:
        token_height, token_width, *_ = super()._get_target_shape(height, width)
        return token_height, token_width, 1, 1
