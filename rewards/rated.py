"""Rewards that a model gives as a rating word: Q-Align (arXiv 2312.17090) and DeQA-Score (2501.11561).

The word that would come next, of excellent, good, fair, poor and bad, is a probability of each; their worths' mean is
the score.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from rewards.base import Metadata, Scores, Spec
from rewards.clip import picture_settings
from rewards.hub import hub
from rewards.owl import Owl
from rewards.vision import Dtype, ModelReward, load_repository, pick_device
from rewards.wording import WORDINGS, named_texts

IMAGE = "<|image|>"
WORDS = ("excellent", "good", "fair", "poor", "bad")
Aspect = Literal["quality", "aesthetics"]


@cache
def load_owl(model: str, device: str, dtype: Dtype) -> Owl:
    """Load the networks; rewards that name the same ones share them."""
    config, tensors = load_repository(model)
    network = Owl(config, tensors, getattr(torch, dtype)).to(pick_device(device), getattr(torch, dtype))
    return network.eval().requires_grad_(False)


def read_question(name: str, place: Path, aspect: Aspect) -> str:
    """The model's question: a text file, or the text in the authors' scorer.py that asks for this aspect.

    Raises:
        ValueError: it lacks <|image|>; one line.
    """
    if place.suffix == ".py":
        texts = [text for text in named_texts(place).values() if IMAGE in text and f"{aspect} of this image" in text]
        text = texts[0] if texts else ""
    else:
        text = place.read_text(encoding="utf-8")
    text = text.replace("{aspect}", aspect).rstrip("\n")
    if text.count(IMAGE) != 1:
        raise ValueError(f"{name}: {place} must hold {IMAGE} once; the authors' words are in their evaluate/scorer.py")
    return text


class RatingWord(ModelReward):
    """Base: the mean worth of the rating word that comes next.

    Args:
        question: the model's question: a text file with <|image|> once, and perhaps {aspect}; or the authors'
            evaluate/scorer.py, whose wording the weights were trained on and which their scores need. Default: ours.
        model: folder or hub name of a published checkpoint.
        aspect: quality, or aesthetics.
        batch_size, device, dtype: of the model.
    """

    name: str
    spec = Spec(frozenset({"image"}), differentiable=True)
    worths: tuple[float, ...]
    """Values of the words, the best first."""

    def __init__(
        self, question: str | None, model: str, aspect: Aspect, batch_size: int, device: str, dtype: Dtype
    ) -> None:
        from transformers import AutoImageProcessor, AutoTokenizer

        super().__init__(batch_size)
        query = read_question(self.name, Path(question) if question else WORDINGS / "rated.txt", aspect)
        tokenizer = AutoTokenizer.from_pretrained(**hub(model))

        def tokens(text: str) -> list[int]:
            ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
            return ids

        before, after = query.split(IMAGE)
        self.network = load_owl(model, device, dtype)
        self.device, self.dtype = pick_device(device), getattr(torch, dtype)
        self.before = torch.tensor([tokenizer.bos_token_id, *tokens(before)], device=self.device)
        self.after = torch.tensor(tokens(after), device=self.device)
        self.words = torch.tensor([tokens(word)[0] for word in WORDS], device=self.device)
        self.preprocess = replace(picture_settings(AutoImageProcessor.from_pretrained(**hub(model))), fit="square")

    def model_scores(self, pixels: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        logits = self.network(pixels, self.before, self.after)[:, self.words].float()
        return Scores(logits.softmax(dim=-1) @ torch.tensor(self.worths, device=logits.device))


class QAlign(RatingWord):
    """Q-Align: quality or aesthetics of a picture, rated in words by an mPLUG-Owl2; 0 to 1 (arXiv 2312.17090).

    Args:
        question, model, aspect, batch_size, device, dtype: as of `RatingWord`.
    """

    name = "q_align"
    worths = (1.0, 0.75, 0.5, 0.25, 0.0)

    def __init__(
        self,
        question: str | None = None,
        model: str = "q-future/one-align",
        aspect: Aspect = "quality",
        batch_size: int = 8,
        device: str = "auto",
        dtype: Dtype = "float16",
    ) -> None:
        super().__init__(question, model, aspect, batch_size, device, dtype)


class DeQA(RatingWord):
    """DeQA-Score: technical quality of a picture, rated in words by an mPLUG-Owl2; 1 to 5 (arXiv 2501.11561).

    Args:
        question, model, batch_size, device, dtype: as of `RatingWord`.
    """

    name = "deqa"
    worths = (5.0, 4.0, 3.0, 2.0, 1.0)

    def __init__(
        self,
        question: str | None = None,
        model: str = "zhiyuanyou/DeQA-Score-Mix3",
        batch_size: int = 8,
        device: str = "auto",
        dtype: Dtype = "float16",
    ) -> None:
        super().__init__(question, model, "quality", batch_size, device, dtype)
