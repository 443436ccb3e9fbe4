"""Sampled texts with what is needed to score their tokens again."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch
from PIL.Image import Image
from torch import Tensor
from torch.nn.functional import pad

from flowalign.policies.language.decoding import Decoding
from samplers import Rows


class TurnTaken(NamedTuple):
    """A turn with an environment."""

    reward: float
    state: str
    """State of the environment before the turn."""


def right_padded(rows: Sequence[Sequence[Any]], padding: object, device: torch.device) -> Tensor:
    """[B, T] rows of different lengths, padded on the right."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[padding] * (width - len(row))] for row in rows], device=device)


@dataclass(kw_only=True)
class TextRollout(Rows):
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
    """[B, T] float32 of the tokens when they were sampled, under the distribution they were drawn from."""
    entropy: Tensor
    """[B, T] float32 of the distributions they were sampled from"""
    ended: Tensor
    """[B] bool: has an end token, was not cut at the largest length"""
    decoding: Decoding
    """Settings of the distribution that tokens were drawn from."""
    padding: int
    """The token that pads prompts and completions."""
    pictures: list[list[Image]] = field(default_factory=list)
    """[B] pictures shown with each prompt; empty for a model that sees none."""
    turn: Tensor = field(default_factory=lambda: torch.empty(0))
    """[B, T] integers: each token's turn, with the environment's answer to it; -1: padding. Default: one turn."""
    episodes: list[list[TurnTaken]] = field(default_factory=list)
    """[B] the turns of each row; empty without an environment"""
    step: Tensor = field(default_factory=lambda: torch.empty(0))
    """[B, T] integers: the step of masked diffusion that opened each position; [B, 0] of texts that are written in
    order"""

    def __post_init__(self) -> None:
        if self.turn.numel() == 0:
            self.turn = self.mask.long() - 1
        if self.step.numel() == 0:
            self.step = self.turn[:, :0]

    @property
    def present(self) -> Tensor:
        """[B, T] bool: all that is no padding."""
        return self.turn >= 0 if self.episodes else self.mask

    def packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The arguments of `unpacked` besides the prompts: tensors, and JSON; pictures are left out."""
        return self.tensors(), {"decoding": asdict(self.decoding), "padding": self.padding, "episodes": self.episodes}

    @classmethod
    def unpacked(cls, tensors: dict[str, Tensor], rest: dict[str, Any], prompts: list[str]) -> Self:
        """The inverse of `packed`."""
        episodes = [[TurnTaken(*turn) for turn in turns] for turns in rest["episodes"]]
        values: dict[str, Any] = tensors | rest | {"decoding": Decoding(**rest["decoding"]), "episodes": episodes}
        return cls(prompts=prompts, **values)

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Join rollouts of one model, padded to one width."""
        prompt = max(rollout.prompt_ids.shape[1] for rollout in parts)
        length = max(rollout.mask.shape[1] for rollout in parts)
        return super().cat([rollout._padded(prompt, length) for rollout in parts])

    def _padded(self, prompt: int, length: int) -> Self:
        """The same with prompts and completions of these widths."""
        left = (prompt - self.prompt_ids.shape[1], 0)
        right = (0, length - self.mask.shape[1])
        return replace(
            self,
            prompt_ids=pad(self.prompt_ids, left, value=self.padding),
            prompt_mask=pad(self.prompt_mask, left),
            completion_ids=pad(self.completion_ids, right, value=self.padding),
            mask=pad(self.mask, right),
            log_prob=pad(self.log_prob, right),
            entropy=pad(self.entropy, right),
            turn=pad(self.turn, right, value=-1),
            step=pad(self.step, right if self.step.shape[1] else (0, 0), value=-1),
        )
