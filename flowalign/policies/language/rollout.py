"""Sampled texts with what is needed to score their tokens again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from PIL.Image import Image
from torch import Tensor


class Taken(NamedTuple):
    """A turn with an environment."""

    reward: float
    state: str
    """that it was taken in"""


@dataclass
class TextRollout:
    """B prompts and their sampled completions. A completion's end token belongs to it.

    With an environment a completion is an episode: the model's turns, and after each the environment's answer.
    """

    prompts: list[str]
    prompt_ids: Tensor
    """[B, P], padded on the left"""
    prompt_mask: Tensor
    """[B, P] bool"""
    completion_ids: Tensor
    """[B, T], padded on the right"""
    mask: Tensor
    """[B, T] bool: the tokens that were sampled"""
    log_prob: Tensor
    """[B, T] float32 of the tokens when they were sampled, at the temperature they were sampled with"""
    entropy: Tensor
    """[B, T] float32 of the distributions they were sampled from"""
    ended: Tensor
    """[B] bool: has an end token, was not cut at the largest length"""
    temperature: float
    pictures: list[list[Image]] = field(default_factory=list)
    """[B] those that each prompt shows; empty for a model without eyes"""
    turn: Tensor = field(default_factory=lambda: torch.empty(0))
    """[B, T] integers: the turn that each token is of, the environment's answer to it included; -1 is padding. Default:
    all that was sampled is one turn"""
    episodes: list[list[Taken]] = field(default_factory=list)
    """[B] the turns of each row; empty without an environment"""

    def __post_init__(self) -> None:
        if self.turn.numel() == 0:
            self.turn = self.mask.long() - 1

    @property
    def present(self) -> Tensor:
        """[B, T] bool: all that is no padding."""
        return self.turn >= 0 if self.episodes else self.mask

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, rows: Tensor) -> "TextRollout":
        """Some of the rows, [N] indices."""
        numbers = rows.tolist()
        listed: dict[str, Any] = {
            name: [values[i] for i in numbers] if values else [] for name, values in self._listed().items()
        }
        return TextRollout(temperature=self.temperature, **listed, **self._mapped(lambda values: values[rows]))

    def to(self, device: torch.device | str) -> "TextRollout":
        """The same on another device."""
        mapped = self._mapped(lambda values: values.to(device))
        return TextRollout(temperature=self.temperature, **self._listed(), **mapped)

    def _listed(self) -> dict[str, Any]:
        return {"prompts": self.prompts, "pictures": self.pictures, "episodes": self.episodes}

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        return {f.name: function(getattr(self, f.name)) for f in fields(self) if f.type is Tensor}

    def packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What `unpacked` makes it of again, given its prompts: tensors, and JSON; pictures are left out."""
        return self._mapped(lambda values: values), {"temperature": self.temperature, "episodes": self.episodes}

    @staticmethod
    def unpacked(tensors: dict[str, Tensor], rest: dict[str, Any], prompts: list[str]) -> "TextRollout":
        """The inverse of `packed`."""
        values: dict[str, Any] = {**tensors}
        episodes = [[Taken(*turn) for turn in own] for own in rest["episodes"]]
        return TextRollout(prompts, temperature=rest["temperature"], episodes=episodes, **values)

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
            widened("turn", length, -1),
            [own for part in parts for own in part.episodes],
        )
