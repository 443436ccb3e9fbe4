"""Sampling of tokens by each row's own seed, for any `generate` that takes a logits processor."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor


class SeededSampler(LogitsProcessor):
    """Draws each row's next token with the row's own random numbers, and records how probable it was.

    One uniform number a token, by the inverse of the cumulative distribution: what a row draws depends neither on the
    other rows of its batch nor on the number of processes.

    Args:
        seeds: one a row.
        length: the most tokens a row may draw.
        temperature: of the distribution; 0 takes the most probable token (and records it at temperature 1).
    """

    def __init__(self, seeds: Sequence[int], length: int, temperature: float) -> None:
        draws = [torch.rand(length, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        self.draws = torch.stack(draws)
        self.temperature = temperature
        self.log_prob: list[Tensor] = []
        self.entropy: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        log_probs = log_softmax(scores, self.temperature)
        if self.temperature == 0:
            token = log_probs.argmax(-1, keepdim=True)
        else:
            below = log_probs.exp().cumsum(-1)
            draw = self.draws[:, len(self.log_prob), None].to(scores.device) * below[:, -1:]
            # the last token of positive probability, where rounding leaves the draw above all
            last = (log_probs > -torch.inf).cumsum(-1).argmax(-1, keepdim=True)
            token = torch.searchsorted(below, draw, right=True).minimum(last)
        self.log_prob.append(log_probs.gather(-1, token)[:, 0])
        self.entropy.append(entropy_of(log_probs))
        return torch.full_like(scores, -torch.inf).scatter(-1, token, 0.0)


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Float32 log-probabilities at a temperature; 0 counts as 1."""
    return (logits.float() / (temperature or 1.0)).log_softmax(-1)


def entropy_of(log_probs: Tensor) -> Tensor:
    """Entropy of distributions given as log-probabilities: [..., V] -> [...]."""
    return -(log_probs.exp() * log_probs.clamp(min=-1e4)).sum(-1)
