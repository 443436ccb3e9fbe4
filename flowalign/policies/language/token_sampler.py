"""Sampling of tokens by each row's own seed, for any `generate` that takes a logits processor."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor

from flowalign.policies.language.decoding import Decoding, entropy_of

Guide = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Logits [B, V] that are moved, from token ids [B, L], their mask, and the network's logits of the next token."""


def uniforms(seeds: Sequence[int], length: int) -> Tensor:
    """[B, length] random numbers in [0, 1), each row by its seed: one a token."""
    return torch.stack([torch.rand(length, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


def draw(log_probs: Tensor, chance: Tensor, decoding: Decoding) -> Tensor:
    """[B] tokens drawn from log-probabilities [B, V] by uniform numbers [B]; at temperature 0 the likeliest ones."""
    if decoding.temperature == 0:
        return log_probs.argmax(-1)
    below = log_probs.exp().cumsum(-1)
    # the last token of positive probability, where rounding leaves the draw above all
    last = (log_probs > -torch.inf).cumsum(-1).argmax(-1)
    return torch.searchsorted(below, chance[:, None] * below[:, -1:], right=True)[:, 0].minimum(last)


class SeededSampler(LogitsProcessor):
    """Draws each row's next token with the row's own random numbers, and records how probable it was.

    One uniform number a token, by the inverse of the cumulative distribution: what a row draws depends neither on the
    other rows of its batch nor on the number of processes.

    Args:
        seeds: one a row.
        length: the most tokens a row may draw.
        decoding: from the logits to the distribution.
        prompt_mask: [B, P] bool of the prompts that rows begin with.
        undrawn: tokens that are never drawn.
        guide: moves the network's logits before anything else.
    """

    def __init__(
        self,
        seeds: Sequence[int],
        length: int,
        decoding: Decoding,
        prompt_mask: Tensor,
        undrawn: Sequence[int] = (),
        guide: Guide | None = None,
    ) -> None:
        self.draws, self.guide = uniforms(seeds, length), guide
        self.decoding, self.prompt_mask, self.undrawn = decoding, prompt_mask, undrawn
        self.log_prob: list[Tensor] = []
        self.entropy: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.guide is not None:
            drawn = torch.ones_like(input_ids[:, self.prompt_mask.shape[1] :], dtype=torch.bool)
            scores = self.guide(input_ids, torch.cat([self.prompt_mask, drawn], 1), scores)
        before = None
        if self.decoding.repetition_penalty != 1:
            width = self.prompt_mask.shape[1]
            before = torch.cat([input_ids[:, :width].where(self.prompt_mask, -1), input_ids[:, width:]], 1)
        log_probs = self.decoding.log_probs(scores, before, undrawn=self.undrawn)
        token = self.drawn(log_probs)[:, None]
        self.log_prob.append(log_probs.gather(-1, token)[:, 0])
        self.entropy.append(entropy_of(log_probs))
        return torch.full_like(scores, -torch.inf).scatter(-1, token, 0.0)

    def drawn(self, log_probs: Tensor) -> Tensor:
        """[B] the next tokens, from their log-probabilities [B, V]."""
        return draw(log_probs, self.draws[:, len(self.log_prob)].to(log_probs.device), self.decoding)


class MultinomialSampler(SeededSampler):
    """Draws each row's tokens as plain `generate` draws those of one text after `torch.manual_seed(seed)`."""

    def __init__(
        self, seeds: Sequence[int], decoding: Decoding, prompt_mask: Tensor, undrawn: Sequence[int] = ()
    ) -> None:
        super().__init__(seeds, 0, decoding, prompt_mask, undrawn)
        self.generators = [torch.Generator(prompt_mask.device).manual_seed(seed) for seed in seeds]

    def drawn(self, log_probs: Tensor) -> Tensor:
        rows = zip(log_probs.exp(), self.generators, strict=True)
        return torch.cat([torch.multinomial(chance[None], 1, generator=own)[0] for chance, own in rows])
