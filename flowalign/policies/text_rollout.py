"""Sampled texts with what is needed to score their tokens again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor


@dataclass
class TextRollout:
    """B prompts and their sampled completions. A completion's end token belongs to it."""

    prompts: list[str]
    prompt_ids: Tensor
    """[B, P], padded on the left"""
    prompt_mask: Tensor
    """[B, P] bool"""
    completion_ids: Tensor
    """[B, T], padded on the right"""
    mask: Tensor
    """[B, T] bool"""
    log_prob: Tensor
    """[B, T] float32 of the tokens when they were sampled, at the temperature they were sampled with"""
    entropy: Tensor
    """[B, T] float32 of the distributions they were sampled from"""
    ended: Tensor
    """[B] bool: has an end token, was not cut at the largest length"""
    temperature: float
    pictures: list[list[Image]] = field(default_factory=list)
    """[B] those that each prompt shows; empty for a model without eyes"""

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, rows: Tensor) -> "TextRollout":
        """Some of the rows, [N] indices."""
        numbers = rows.tolist()
        pictures = [self.pictures[i] for i in numbers] if self.pictures else []
        return self._mapped([self.prompts[i] for i in numbers], pictures, lambda values: values[rows])

    def to(self, device: torch.device | str) -> "TextRollout":
        """The same on another device."""
        return self._mapped(self.prompts, self.pictures, lambda values: values.to(device))

    def _mapped(
        self, prompts: list[str], pictures: list[list[Image]], function: Callable[[Tensor], Tensor]
    ) -> "TextRollout":
        tensors = {f.name: function(getattr(self, f.name)) for f in fields(self) if f.type is Tensor}
        return TextRollout(prompts, temperature=self.temperature, pictures=pictures, **tensors)

    @staticmethod
    def cat(parts: Sequence["TextRollout"], padding: int) -> "TextRollout":
        """Join rollouts made with the same settings.

        Args:
            padding: the padding token.
        """
        prompt = max(part.prompt_ids.shape[1] for part in parts)
        length = max(part.mask.shape[1] for part in parts)

        def widened(name: str, width: int, value: Any, left: bool = False) -> Tensor:
            rows = []
            for part in parts:
                own = getattr(part, name)
                extra = own.new_full((len(own), width - own.shape[1]), value)
                rows.append(torch.cat([extra, own] if left else [own, extra], 1))
            return torch.cat(rows)

        return TextRollout(
            [text for part in parts for text in part.prompts],
            widened("prompt_ids", prompt, padding, left=True),
            widened("prompt_mask", prompt, False, left=True),
            widened("completion_ids", length, padding),
            widened("mask", length, False),
            widened("log_prob", length, 0),
            widened("entropy", length, 0),
            torch.cat([part.ended for part in parts]),
            parts[0].temperature,
            [shown for part in parts for shown in part.pictures],
        )
