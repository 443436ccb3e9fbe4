"""A policy over a transformers image-text-to-text model: a language model that is shown pictures with its prompts."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image, fromarray
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel, ProcessorMixin

from flowalign.errors import ConfigError
from flowalign.policies.language.chat import ChatTemplate
from flowalign.policies.language.policy import ATTENTION_PROJECTIONS, LanguagePolicy
from flowalign.policies.language.rollout import TextRollout
from rewards import bind
from rewards.pictures import read_picture
from rewards.text.model import CausalModel, Context, Pictured


class VisionLanguagePolicy(LanguagePolicy):
    """An image-text-to-text model that is trained, as a judge for one.

    A prompt is a user's turn: its pictures, then its text. Pictures pass through the model's own processor, at replay
    again, so that a rollout keeps pictures and no model's own inputs.

    Args:
        network: the model, loaded.
        processor: its processor, with a tokenizer and a chat template.
        device: where it samples and trains.
        system: the system's turn before a prompt.
        template, template_arguments: as of `LanguagePolicy`.
    """

    noun = "image-text-to-text model"
    networks = AutoModelForImageTextToText
    readers = AutoProcessor

    def __init__(
        self,
        network: PreTrainedModel,
        processor: ProcessorMixin,
        device: torch.device | str = "cpu",
        system: str | None = None,
        template: str | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(network, processor.tokenizer, device, system=system, template_arguments=template_arguments)
        if template is not None:
            processor.chat_template = template
        self.processor = processor
        self.tokenizer.padding_side = "left"
        if processor.chat_template is None:
            raise ConfigError("model.images: this processor has no chat template to show pictures by")

    @property
    def lora_targets(self) -> list[str]:
        """The attention of the language model; the vision model stays as it is."""
        names = [name for name, _ in self.network.named_modules() if "language_model." in name]
        return [name for name in names if name.rpartition(".")[2] in ATTENTION_PROJECTIONS]

    def add_lora(
        self, rank: int, alpha: float, targets: Sequence[str] | str | None = None, init: bool | str = True
    ) -> None:
        if targets == "all-linear":
            layers = self.network.named_modules()
            targets = [name for name, m in layers if isinstance(m, nn.Linear) and "language_model." in name]
        super().add_lora(rank, alpha, targets, init)

    @property
    def undrawn(self) -> list[int]:
        """The tokens that stand for pictures: a text with one would ask the network for a picture that is not there."""
        named = (getattr(self.network.config, f"{kind}_token_id", None) for kind in ("image", "video"))
        return [token for token in named if token is not None]

    def pictures(self, metadata: Sequence[Mapping[str, Any]]) -> list[list[Image]]:
        """The pictures under 'image' in each prompt's metadata: one or a list, as pictures or files.

        'image_noise' is the standard deviation of noise on them, where pixels lie in [0, 1]; it is the same each time.
        """
        shown = [record.get("image", []) for record in metadata]
        rows = [images if isinstance(images, list | tuple) else [images] for images in shown]
        noises = [float(record.get("image_noise", 0)) for record in metadata]
        return [[_noisy(_opened(each), noise) for each in images] for images, noise in zip(rows, noises, strict=True)]

    def prompt_inputs(self, prompts: Sequence[str], pictures: Sequence[Sequence[Image]], room: int) -> dict[str, Any]:
        pictures = pictures or [[] for _ in prompts]
        texts = [self._turn(prompt, len(shown)) for prompt, shown in zip(prompts, pictures, strict=True)]
        images = [list(shown) for shown in pictures] if any(pictures) else None
        inputs = self.processor(text=texts, images=images, padding=True, return_tensors="pt")
        self.check_room(inputs["attention_mask"].sum(1).tolist(), prompts, room)
        return dict(inputs.to(self.device, self.dtype))

    def continued_inputs(
        self,
        prompts: Sequence[str],
        pictures: Sequence[Sequence[Image]],
        continuations: Sequence[list[int]],
        room: int,
    ) -> dict[str, Any]:
        inputs = self.prompt_inputs(prompts, pictures, 0)
        kept = inputs["attention_mask"].bool()
        lengths = [int(row.sum()) + len(tokens) for row, tokens in zip(kept, continuations, strict=True)]
        self.check_room(lengths, prompts, room)
        width = max(lengths)
        for name, values in inputs.items():
            if name not in ("input_ids", "attention_mask") and not name.endswith("token_type_ids"):
                continue
            padding = self.tokenizer.pad_token_id if name == "input_ids" else 0
            rows = []
            for row, mask, tokens in zip(values, kept, continuations, strict=True):
                # the continuation is attended to, and of type 0: text
                more = tokens if name == "input_ids" else [int(name == "attention_mask")] * len(tokens)
                whole = row[mask].tolist() + more
                rows.append([padding] * (width - len(whole)) + whole)
            inputs[name] = torch.tensor(rows, device=self.device)
        return inputs

    def bind(self, reward: object) -> None:
        bind(reward, PicturedModel(self))

    def replay_inputs(self, rollout: TextRollout, rows: Tensor, attention: Tensor) -> dict[str, Any]:
        """The processor's output for the pictures; the model counts positions itself, as some do so in 3D."""
        numbers = rows.tolist()
        shown = [rollout.pictures[i] for i in numbers] if rollout.pictures else []
        inputs = self.prompt_inputs([rollout.prompts[i] for i in numbers], shown, 0)
        width, prompt = inputs.pop("attention_mask").shape[1], rollout.prompt_mask.shape[1]
        inputs.pop("input_ids")
        for name, value in inputs.items():
            # kinds of tokens: the completion's are text, 0
            if name.endswith("token_type_ids"):
                inputs[name] = torch.nn.functional.pad(value, (prompt - width, attention.shape[1] - prompt))
        return inputs

    def _turn(self, prompt: str, pictures: int) -> str:
        content: list[dict[str, str]] = [{"type": "image"} for _ in range(pictures)]
        messages: list[dict[str, Any]] = [{"role": "user", "content": [*content, {"type": "text", "text": prompt}]}]
        return self.chat_template.prompt(messages)

    @property
    def chat_template(self) -> ChatTemplate:
        template = super().chat_template
        template.system = None if self.system is None else [{"type": "text", "text": self.system}]
        return template

    @property
    def _apply_template(self) -> Callable[..., Any]:
        return self.processor.apply_chat_template

    def save(self, folder: str | Path, weights: dict[str, Tensor] | None = None) -> None:
        """Write what `from_pretrained`, a judge of `vlm_judge` and peft load."""
        self.network.save_pretrained(str(folder), state_dict=weights)
        self.processor.save_pretrained(str(folder))


class PicturedModel(CausalModel):
    """The policy as rewards ask it: with the pictures of each prompt, by its chat template."""

    sees_pictures = True

    def __init__(self, policy: VisionLanguagePolicy) -> None:
        super().__init__(policy.network, policy.tokenizer)
        self.policy, self.snapshot, self.processor = policy, policy.snapshot, policy.processor

    def begin(self, prompt: str, record: Mapping[str, Any]) -> Context:
        return Pictured(prompt, self.policy.pictures([record])[0])

    def inputs(self, contexts: Sequence[Any], texts: Sequence[list[int]]) -> tuple[dict[str, Any], list[int]]:
        if not isinstance(contexts[0], Pictured):
            return super().inputs(contexts, texts)
        continuations = [context.after + text for context, text in zip(contexts, texts, strict=True)]
        prompts, pictures = [context.prompt for context in contexts], [context.pictures for context in contexts]
        inputs = self.policy.continued_inputs(prompts, pictures, continuations, 0)
        # rows end together
        width = inputs["input_ids"].shape[1]
        return inputs, [width - len(text) for text in texts]


def _noisy(image: Image, noise: float) -> Image:
    """A picture with Gaussian noise on its pixels, cut off at black and white."""
    if noise == 0:
        return image
    pixels = np.asarray(image, dtype=np.float64) / 255
    moved = pixels + noise * np.random.default_rng(0).standard_normal(pixels.shape)
    return fromarray((255 * moved.clip(0, 1)).round().astype(np.uint8))


def _opened(image: Image | str | Path) -> Image:
    return image.convert("RGB") if isinstance(image, Image) else read_picture(image)
