"""Rewards of what a text means: how near its embedding is to that of a reference, or to the pictures that it is
about."""

import re
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

from rewards.base import Metadata, RewardError, Scores, Spec, source_images
from rewards.clip import load_dual_encoder
from rewards.hub import hub, reason
from rewards.text.verifiers import answers
from rewards.vision import Dtype, pick_device

_NEEDS = frozenset({"text", "prompt", "metadata"})


class _Encodes:
    """Base: a frozen encoder of texts.

    Args:
        model: folder or hub name.
        key: key of the reference text in the metadata.
    """

    name: str

    def __init__(self, model: str, key: str, batch_size: int, device: str, dtype: Dtype) -> None:
        try:
            network = AutoModel.from_pretrained(**hub(model), dtype=getattr(torch, dtype))
            self.tokenizer = AutoTokenizer.from_pretrained(**hub(model))
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.name}: no encoder of texts at '{model}': {reason(error)}") from error
        self.network = network.to(pick_device(device)).eval().requires_grad_(False)
        self.tokenizer.padding_side = "right"
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.key, self.batch_size, self.spec = key, batch_size, Spec(_NEEDS)


class TextSimilarity(_Encodes):
    """Cosine of the embeddings of a text and of the reference under `answer`, in [-1, 1], as of sentence-transformers.

    An encoder's similarities lie close together (ARMed): `normalized` gives them the spread of the other rewards in a
    group again.

    Args:
        model: folder or hub name of an encoder, such as sentence-transformers/all-MiniLM-L6-v2.
        pooling: of its last layer: the mean over tokens, the first token, or the last one.
        pattern: a regular expression whose first group is what is compared of a text, its last match counting; without
            one a text gets 0.
    """

    name = "text_similarity"

    def __init__(
        self,
        model: str,
        key: str = "answer",
        pooling: Literal["mean", "first", "last"] = "mean",
        pattern: str | None = None,
        batch_size: int = 32,
        device: str = "auto",
        dtype: Dtype = "float32",
    ) -> None:
        super().__init__(model, key, batch_size, device, dtype)
        self.pooling = pooling
        self.pattern = None if pattern is None else re.compile(pattern, re.DOTALL)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        right = answers(self.name, prompts, metadata, self.key)
        compared = [_compared(self.pattern, text) for text in samples]
        similarity = (self.vectors(compared) * self.vectors(right)).sum(-1).cpu()
        return Scores(similarity.where(torch.tensor([bool(text.strip()) for text in compared]), 0))

    @torch.no_grad()
    def vectors(self, texts: Sequence[str]) -> Tensor:
        """[N, D] unit vectors; a text that comes more than once is encoded once."""
        distinct = list(dict.fromkeys(texts))
        rows = [self._pooled(distinct[i : i + self.batch_size]) for i in range(0, len(distinct), self.batch_size)]
        return torch.cat(rows)[[distinct.index(text) for text in texts]]

    def _pooled(self, texts: Sequence[str]) -> Tensor:
        # an empty text still has the tokens around it, or nothing at all
        inputs = self.tokenizer([text or " " for text in texts], padding=True, truncation=True, return_tensors="pt")
        inputs.pop("token_type_ids", None)
        inputs = inputs.to(self.network.device)
        hidden = self.network(**inputs).last_hidden_state.float()
        mask = inputs["attention_mask"].float()
        if self.pooling == "mean":
            pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        else:
            last = (mask.sum(1).long() - 1).clamp(min=0)
            place = torch.zeros_like(last) if self.pooling == "first" else last
            pooled = hidden[torch.arange(len(hidden), device=hidden.device), place]
        return F.normalize(pooled, dim=-1)


def _compared(pattern: re.Pattern[str] | None, text: str) -> str:
    """What is compared of a text: what the pattern finds last, or all of it."""
    if pattern is None:
        return text
    found = pattern.findall(text)
    return str(found[-1]) if found else ""


class TokenSimilarity(_Encodes):
    """Bidirectional mean of the largest cosines of token embeddings of a text and of the reference (BMAS of Mixed-R1,
    arXiv
    2505.24164), in [-1, 1].

    Each token of the one is matched with the nearest of the other, by the model's input embeddings; the value is the
    mean of both directions' means. An empty text gets 0.

    Args:
        model: folder or hub name of a language model or encoder.
    """

    name = "token_similarity"

    def __init__(self, model: str, key: str = "answer", device: str = "auto", dtype: Dtype = "float32") -> None:
        super().__init__(model, key, 1, device, dtype)

    @torch.no_grad()
    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        right = answers(self.name, prompts, metadata, self.key)
        pairs = zip(samples, right, strict=True)
        return Scores(torch.tensor([both_ways(self._embedded(text), self._embedded(answer)) for text, answer in pairs]))

    def _embedded(self, text: str) -> Tensor:
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        table = self.network.get_input_embeddings()
        return F.normalize(table(torch.tensor(ids, dtype=torch.long, device=self.network.device)).float(), dim=-1)


def both_ways(first: Tensor, second: Tensor) -> float:
    """Mean over rows of the largest cosine with the other side's rows, both directions averaged; 0 where a side is
    empty.

    Args:
        first, second: [N, D], [M, D] unit vectors.
    """
    if not len(first) or not len(second):
        return 0.0
    table = first @ second.T
    return float((table.amax(1).mean() + table.amax(0).mean()) / 2)


class PictureMatch:
    """Mean cosine of a text with the pictures that its prompt shows, by a CLIP or SigLIP, times `scale`.

    As a reward of captions (RLCF, arXiv 2305.18010, whose average reward of the samples is an advantage's mean), and of
    reasoning about frames (VideoRFT, arXiv 2505.12434, after the abstract): `pattern` picks what is compared.

    Args:
        model: folder or hub name of a dual encoder.
        processor: folder or hub name of its tokenizer and picture settings, if they are not with the model.
        pattern: a regular expression whose first group is what is compared, its last match counting; without one a text
            gets 0. Default: the whole text.
    """

    name = "picture_match"
    spec = Spec(_NEEDS)

    def __init__(
        self,
        model: str = "openai/clip-vit-large-patch14",
        processor: str | None = None,
        pattern: str | None = None,
        scale: float = 1.0,
        device: str = "auto",
        dtype: Dtype = "float32",
    ) -> None:
        self.encoder = load_dual_encoder(model, processor=processor, device=device, dtype=dtype)
        self.pattern = None if pattern is None else re.compile(pattern, re.DOTALL)
        self.scale = scale

    @torch.no_grad()
    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        for prompt, record in zip(prompts, metadata, strict=True):
            if "image" not in record:
                raise RewardError(f"reward 'picture_match': the prompt {prompt!r} shows no pictures under 'image'")
        compared = [_compared(self.pattern, text) for text in samples]
        texts = self.encoder.texts(compared)
        value = []
        for vector, text, pictures in zip(texts, compared, source_images(metadata), strict=True):
            pixels = self.encoder.preprocess.images(pictures).to(self.encoder.device, self.encoder.dtype)
            match = (self.encoder.images(pixels) @ vector).mean()
            value.append(self.scale * float(match) if text.strip() else 0.0)
        return Scores(torch.tensor(value))
