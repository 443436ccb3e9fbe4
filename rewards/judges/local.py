"""A judge from any image-text-to-text model of transformers, or of texts any language model, in this process."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal

import torch
from PIL.Image import Image
from torch import Tensor
from transformers import (
    BatchEncoding,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    ProcessorMixin,
)
from transformers.image_processing_backends import TorchvisionBackend

from rewards.hub import hub, shipped
from rewards.judges.base import Judge, Question, spells
from rewards.judges.cache import CachedJudge
from rewards.judges.texts import TextProcessor, classes_of
from rewards.usage import Usage, usage_of
from rewards.vision import pick_device, to_tensor


@dataclass
class Local:
    """Settings of a local judge."""

    __pydantic_config__ = {"extra": "forbid"}

    model: str
    """Folder or hub name, or 'tiny_vlm', which comes with flowalign; a language model judges texts alone."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str | None = None
    """Device of the model; default this process's GPU where there is one."""
    batch_size: int = 8
    """Questions in a network call."""
    cache: str | None = None
    """Folder where answers are kept, so that the same question is asked once."""

    def build(self, name: str) -> Judge:
        device = str(pick_device(self.device or "auto"))
        usage = usage_of(name)
        loaded = _load(shipped(self.model), self.dtype, device)
        judge = LocalJudge(*loaded, self.batch_size, usage)
        return judge if self.cache is None else CachedJudge(judge, self.cache, f"{self.model} {self.dtype}", usage)


@cache
def _load(path: str, dtype: str, device: str) -> tuple[Any, Any]:
    """Model and processor; judges of the same weights share them."""
    networks, processors = classes_of(path)
    model = networks.from_pretrained(**hub(path), dtype=getattr(torch, dtype))
    return model.to(device).eval().requires_grad_(False), processors.from_pretrained(**hub(path))


class LocalJudge:
    """Asks a model directly.

    Args:
        model: an image-text-to-text model of transformers with `generate`, or a causal language model.
        processor: its processor, with a chat template; of a language model a `TextProcessor`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        processor: ProcessorMixin | TextProcessor,
        batch_size: int = 8,
        usage: Usage | None = None,
    ) -> None:
        self.model, self.processor, self.batch_size = model, processor, batch_size
        self.usage = usage or Usage()
        self.tokenizer = processor.tokenizer
        self.tokenizer.padding_side = "left"
        self.differentiable = isinstance(getattr(processor, "image_processor", None), TorchvisionBackend)
        """Whether the processor prepares pictures by torch, which passes gradients on."""

    @torch.no_grad()
    def choose(self, questions: Sequence[Question], labels: Sequence[str]) -> list[list[float] | None]:
        chances: list[list[float] | None] = []
        for chunk in self._batches(questions):
            begin, inputs = time.perf_counter(), self._inputs(chunk)
            chances += self._label_logits(inputs, labels).softmax(dim=-1).tolist()
            self._count(begin, inputs)
        return chances

    def label_logits(self, questions: Sequence[Question], labels: Sequence[str]) -> Tensor:
        """[N, L] log of each label's unnormalised probability as the reply's first token, in one network call; with
        a gradient where the model or a picture has one."""
        return self._label_logits(self._inputs(questions), labels)

    def _label_logits(self, inputs: Any, labels: Sequence[str]) -> Tensor:
        columns = [self._tokens_of(label) for label in labels]
        logits = self.model(**inputs, logits_to_keep=1).logits[:, -1].float()
        return torch.stack([logits[:, ids].logsumexp(dim=-1) for ids in columns], dim=-1)

    @torch.no_grad()
    def begins(self, questions: Sequence[Question], answers: Sequence[Sequence[str]]) -> list[float]:
        """Probability that a reply begins as one of its question's answers do: of their first tokens, one for each."""
        chances: list[float] = []
        for chunk in self._batches(list(zip(questions, answers, strict=True))):
            begin, inputs = time.perf_counter(), self._inputs([question for question, _ in chunk])
            probability = self.model(**inputs, logits_to_keep=1).logits[:, -1].float().softmax(dim=-1)
            for row, (_, starts) in zip(probability, chunk, strict=True):
                first = [self.tokenizer.encode(answer, add_special_tokens=False)[0] for answer in starts]
                chances.append(float(row[first].sum()))
            self._count(begin, inputs)
        return chances

    @torch.no_grad()
    def echo(self, questions: Sequence[Question], answers: Sequence[str]) -> list[float]:
        means = []
        for chunk in self._batches(list(zip(questions, answers, strict=True))):
            begin, shown = time.perf_counter(), self._inputs([question for question, _ in chunk])
            answered = self._inputs([question for question, _ in chunk], [answer for _, answer in chunk])
            counts = answered["attention_mask"].sum(dim=1) - shown["attention_mask"].sum(dim=1)  # tokens of the answers
            longest = int(counts.max())
            logits = self.model(**answered, logits_to_keep=longest + 1).logits[:, :-1].float()
            tokens = answered["input_ids"][:, -longest:]
            log_probs = logits.log_softmax(dim=-1).gather(-1, tokens[..., None])[..., 0]
            of_answer = torch.arange(longest, device=counts.device) >= longest - counts[:, None]
            means += ((log_probs * of_answer).sum(dim=1) / counts).tolist()
            self._count(begin, answered)
        return means

    @torch.no_grad()
    def reply(self, questions: Sequence[Question], temperature: float, max_tokens: int, seed: int) -> list[str]:
        texts: list[str] = []
        for chunk in self._batches(questions):
            begin, inputs = time.perf_counter(), self._inputs(chunk)
            processors = LogitsProcessorList()
            if temperature > 0:
                # each batch starts anew, on a stream of its own
                generator = torch.Generator(self.model.device).manual_seed(seed * 2**20 + len(texts))
                processors.append(Gumbel(temperature, generator))
            tokens = self.model.generate(
                **inputs, do_sample=False, max_new_tokens=max_tokens, logits_processor=processors
            )
            new = tokens[:, inputs["input_ids"].shape[1] :]
            texts += self.processor.batch_decode(new, skip_special_tokens=True)
            self._count(begin, inputs, int((new != self.tokenizer.pad_token_id).sum()))
        return texts

    def _count(self, begin: float, inputs: Any, replied: int = 0) -> None:
        seconds, mask = time.perf_counter() - begin, inputs["attention_mask"]
        self.usage.add(requests=len(mask), seconds=seconds, question_tokens=int(mask.sum()), reply_tokens=replied)

    def _inputs(self, questions: Sequence[Question], answers: Sequence[str] | None = None) -> Any:
        texts = []
        for i, question in enumerate(questions):
            content: list[dict[str, str]] = [{"type": "image"} for _ in question.pictures]
            messages: list[dict[str, Any]] = [
                {"role": "user", "content": [*content, {"type": "text", "text": question.text}]}
            ]
            if question.system:
                messages.insert(0, {"role": "system", "content": [{"type": "text", "text": question.system}]})
            text = self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            texts.append(text + answers[i] if answers else text)
        shown = [question.pictures for question in questions]
        if any(isinstance(picture, Tensor) for row in shown for picture in row):
            # the processor divides 8 bits by 255 and leaves tensors alone, whose gradients pass
            images: Any = [[p if isinstance(p, Tensor) else to_tensor(p) for p in row] for row in shown]
            scale = {"do_rescale": False}
        else:
            images, scale = [[p.convert("RGB") for p in row if isinstance(p, Image)] for row in shown], {}
        images = images if any(images) else None
        inputs = self.processor(text=texts, images=images, padding=True, return_tensors="pt", **scale)
        if isinstance(self.processor, TextProcessor):
            # a network of texts takes no more than these
            inputs = BatchEncoding({name: inputs[name] for name in ("input_ids", "attention_mask")})
            return inputs.to(self.model.device)
        return inputs.to(self.model.device, self.model.dtype)

    def _batches(self, items: Sequence[Any]) -> list[Sequence[Any]]:
        return [items[start : start + self.batch_size] for start in range(0, len(items), self.batch_size)]

    @cached_property
    def _vocabulary(self) -> list[str]:
        return self.tokenizer.batch_decode([[i] for i in range(len(self.tokenizer))])

    def _tokens_of(self, label: str) -> list[int]:
        ids = [i for i, token in enumerate(self._vocabulary) if spells(token, label)]
        if not ids:
            raise ValueError(f"no token of this model spells {label!r}; choose labels of one token")
        return ids


class Gumbel(LogitsProcessor):
    """Sampling as an argmax: logits / temperature plus Gumbel noise from a generator of our own.

    The global random numbers stay untouched, as rollouts may be under way in another thread.
    """

    def __init__(self, temperature: float, generator: torch.Generator) -> None:
        self.temperature, self.generator = temperature, generator

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        noise = torch.empty_like(scores, dtype=torch.float32).exponential_(generator=self.generator)
        return scores.float() / self.temperature - noise.log()
