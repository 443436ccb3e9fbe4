"""How tokens are drawn from a model's logits, and how probable each draw was: one rule for sampling and scoring."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Decoding:
    """The distribution that tokens are drawn from; a model's own generation_config has no part in it.

    The order is transformers': repetition_penalty, temperature, top_k, top_p, min_p.
    """

    temperature: float = 1.0
    """Temperature of sampling; 0 takes the most probable token, and scores it at temperature 1."""
    top_p: float = 1.0
    """Probability that the most probable tokens, which are kept, have together (arXiv 1904.09751)."""
    top_k: int = 0
    """Number of most probable tokens to keep; 0: all."""
    min_p: float = 0.0
    """Share of the largest probability that a token must have to be kept (arXiv 2407.01082)."""
    repetition_penalty: float = 1.0
    """Penalty of earlier tokens: their logits are divided by it where positive, else multiplied (arXiv 1909.05858)."""

    @classmethod
    def of(cls, settings: object) -> Self:
        """Decoding from settings with fields of these names."""
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})

    def log_probs(
        self, logits: Tensor, before: Tensor | None = None, drawn: Tensor | None = None, undrawn: Sequence[int] = ()
    ) -> Tensor:
        """[N, V] float32 log-probabilities, -inf of tokens that are not kept.

        Args:
            logits: [N, V].
            before: [N, L] token ids that came before, -1 for none; for repetition_penalty.
            drawn: [N] tokens drawn already, by these weights or earlier ones: they are kept whatever the logits say
                now, so that every one has a probability.
            undrawn: tokens that are never kept.
        """
        scores = logits.float()
        if self.repetition_penalty != 1:
            assert before is not None
            penalised = torch.where(scores > 0, scores / self.repetition_penalty, scores * self.repetition_penalty)
            scores = torch.where(_named(before, scores.shape[-1]), penalised, scores)
        if undrawn:
            scores = scores.index_fill(-1, torch.tensor(undrawn, device=scores.device), -torch.inf)
        if self.temperature not in (0, 1):
            scores = scores / self.temperature
        if self.cuts:
            allowed = self._kept(scores.detach())
            if drawn is not None:
                allowed = allowed.scatter(-1, drawn[:, None], True)
            scores = scores.masked_fill(~allowed, -torch.inf)
        return scores.log_softmax(-1)

    @property
    def cuts(self) -> bool:
        """Some tokens are not kept."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def _kept(self, scores: Tensor) -> Tensor:
        """[N, V] bool."""
        ordered, order = scores.sort(-1, descending=True)
        if self.top_k > 0:
            ordered[:, self.top_k :] = -torch.inf
        chance = ordered.softmax(-1)
        allowed = ordered > -torch.inf
        if self.top_p < 1:
            allowed &= chance.cumsum(-1) - chance < self.top_p
        allowed &= chance >= self.min_p * chance[:, :1]
        return torch.zeros_like(allowed).scatter(-1, order, allowed)


def _named(ids: Tensor, vocabulary: int) -> Tensor:
    """[N, V] bool: the tokens that are among the ids [N, L]; -1 is none."""
    named = torch.zeros(len(ids), vocabulary + 1, dtype=torch.bool, device=ids.device)
    return named.scatter(1, ids.where(ids >= 0, vocabulary), True)[:, :vocabulary]


def entropy_of(log_probs: Tensor) -> Tensor:
    """Entropy of distributions given as log-probabilities: [..., V] -> [...]."""
    return -(log_probs.exp() * log_probs.clamp(min=-1e4)).sum(-1)


def collision_of(log_probs: Tensor) -> Tensor:
    """Chance that two draws are alike, the sum of squared probabilities: [..., V] -> [...]."""
    return (2 * log_probs).exp().sum(-1)
