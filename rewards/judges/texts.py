"""A language model without eyes as a judge of texts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    BatchEncoding,
    PreTrainedTokenizerBase,
)

from rewards.hub import hub


class TextProcessor:
    """A tokenizer where a judge has a processor: chats are put into its template, and pictures are refused.

    A tokenizer without a chat template gets the question as it is, after the system's message.
    """

    image_processor = None

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token

    @classmethod
    def from_pretrained(cls, **source: object) -> "TextProcessor":
        """The tokenizer of a folder or of the hub; arguments are those of transformers."""
        return cls(AutoTokenizer.from_pretrained(**source))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the tokenizer."""
        self.tokenizer.save_pretrained(folder)

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **settings: object) -> str:
        """A conversation of one question as a text."""
        parts = [
            (message["role"], [part["text"] for part in message["content"] if "text" in part]) for message in messages
        ]
        if self.tokenizer.chat_template is None:
            return "\n".join(text for _, texts in parts for text in texts)
        turns = [{"role": role, "content": "\n".join(texts)} for role, texts in parts]
        return str(self.tokenizer.apply_chat_template(turns, **settings))

    def __call__(self, text: Sequence[str], images: object = None, **settings: object) -> BatchEncoding:
        """Tokens of texts; a chat template has put special tokens into them already."""
        if images is not None:
            raise ValueError("this judge is a language model, which sees no pictures; a vision-language model does")
        return self.tokenizer(list(text), add_special_tokens=self.tokenizer.chat_template is None, **settings)

    def batch_decode(self, tokens: object, **settings: object) -> list[str]:
        """Texts of token ids."""
        return list(self.tokenizer.batch_decode(tokens, **settings))


def classes_of(path: str) -> tuple[Any, Any]:
    """Class of the model at a path, and of its processor."""
    config = AutoConfig.from_pretrained(**hub(path))
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText, AutoProcessor
    return AutoModelForCausalLM, TextProcessor
