"""Continuous batching: a text that ends gives its row of the batch to the next prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from flowalign.errors import ConfigError
from flowalign.policies.language.decoding import Decoding, entropy_of
from flowalign.policies.language.rollout import TextRollout
from flowalign.policies.language.token_sampler import draw, uniforms
from flowalign.runs.progress import report

REFILL = 8
"""Prompts enter once this fraction (one of 8) of the rows is free, so that few network calls read prompts."""


class Writer(Protocol):
    """What a language policy has for it."""

    network: Any
    tokenizer: Any
    forwards: int

    @property
    def ends(self) -> list[int]: ...

    @property
    def undrawn(self) -> list[int]: ...

    def last_logits(self, **inputs: Any) -> Tensor: ...


@dataclass(kw_only=True)
class Playing:
    """R texts that are being written. All end in the last column."""

    text: Tensor
    """[R] number of the text"""
    ids: Tensor
    """[R, W] prompts and what was drawn, padded on the left"""
    mask: Tensor
    """[R, W] bool"""
    cache: DynamicCache
    """Keys and values [R, heads, W, size] of each layer."""
    logits: Tensor
    """[R, V] of the next token"""

    def keep(self, rows: Tensor) -> None:
        """Drop the other rows, and the columns that no row needs any more."""
        unused = self.ids.shape[1] - int(self.mask[rows].sum(1).max()) if len(rows) else 0
        self.text, self.logits = self.text[rows], self.logits[rows]
        self.ids, self.mask = self.ids[rows, unused:], self.mask[rows, unused:]
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys[rows, :, unused:], layer.values[rows, :, unused:]

    def join(self, other: "Playing") -> None:
        """Add the rows of another."""
        width = max(self.ids.shape[1], other.ids.shape[1])

        def joined(ours: Tensor, theirs: Tensor) -> Tensor:
            return torch.cat([pad(each, (width - each.shape[1], 0)) for each in (ours, theirs)])

        def cached(ours: Tensor, theirs: Tensor) -> Tensor:
            return torch.cat([pad(each, (0, 0, width - each.shape[2], 0)) for each in (ours, theirs)])

        self.text, self.logits = torch.cat([self.text, other.text]), torch.cat([self.logits, other.logits])
        self.ids, self.mask = joined(self.ids, other.ids), joined(self.mask, other.mask)
        for layer, more in zip(self.cache.layers, other.cache.layers, strict=True):
            layer.keys, layer.values = cached(layer.keys, more.keys), cached(layer.values, more.values)


def keeps_keys_and_values(network: PreTrainedModel) -> bool:
    """Whether all that the network remembers of earlier tokens are their keys and values."""
    layers = DynamicCache(config=network.config).layers
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


def generate_continuously(
    policy: Writer,
    prompts: Sequence[str],
    inputs: dict[str, Tensor],
    seeds: Sequence[int],
    length: int,
    rule: Decoding,
    size: int,
) -> TextRollout:
    """What `LanguagePolicy.generate` gives, with at most `size` texts in a network call.

    A row's tokens depend on its prompt and seed alone, so that the texts are the same.

    Args:
        inputs: `prompt_inputs` of all prompts.

    Raises:
        ConfigError: the network remembers something else than keys and values, or a prompt shows pictures.
    """
    if inputs.keys() - {"input_ids", "attention_mask"}:
        raise ConfigError("continuous_batching: works without pictures; false works")
    if not keeps_keys_and_values(policy.network):
        raise ConfigError(
            "continuous_batching: this network remembers more than keys and values of tokens; false works"
        )
    ids, prompt_mask = inputs["input_ids"], inputs["attention_mask"].bool()
    texts, device = len(prompts), ids.device
    drawn = torch.full((texts, length), policy.tokenizer.pad_token_id, device=device)
    log_prob, entropy = torch.zeros(2, texts, length, device=device)
    count = torch.zeros(texts, dtype=torch.long, device=device)
    ended = torch.zeros(texts, dtype=torch.bool, device=device)
    chance, ends = uniforms(seeds, length).to(device), torch.tensor(policy.ends, device=device)

    begun = min(size, texts)
    playing = _begin(policy, ids, prompt_mask, torch.arange(begun, device=device))
    while True:
        before = playing.ids.where(playing.mask, -1) if rule.repetition_penalty != 1 else None
        log_probs = rule.log_probs(playing.logits, before, undrawn=policy.undrawn)
        text = playing.text
        place = text, count[text]
        token = draw(log_probs, chance[place], rule)
        drawn[place] = token
        log_prob[place], entropy[place] = log_probs.gather(-1, token[:, None])[:, 0], entropy_of(log_probs)
        count[text] += 1
        ended[text] = torch.isin(token, ends)
        playing.ids = torch.cat([playing.ids, token[:, None]], 1)
        playing.mask = pad(playing.mask, (0, 1), value=True)

        goes_on = (~ended[text] & (count[text] < length)).nonzero()[:, 0]
        if len(goes_on):
            # the cache lacks the token that was just drawn
            if len(goes_on) < len(text):
                playing.keep(goes_on)
            _read(policy, playing)
        free = size - len(goes_on)
        if begun < texts and free * REFILL >= size:
            report(begun, texts)
            new = torch.arange(begun, min(begun + free, texts), device=device)
            begun += len(new)
            entering = _begin(policy, ids, prompt_mask, new)
            if len(goes_on):
                playing.join(entering)
            else:
                playing = entering
        elif not len(goes_on):
            break
    policy.forwards += texts
    longest = int(count.max())
    return TextRollout(
        prompts=list(prompts),
        prompt_ids=ids,
        prompt_mask=prompt_mask,
        completion_ids=drawn[:, :longest],
        mask=torch.arange(longest, device=device) < count[:, None],
        log_prob=log_prob[:, :longest],
        entropy=entropy[:, :longest],
        ended=ended,
        decoding=rule,
        padding=policy.tokenizer.pad_token_id,
        pictures=[],
    )


def _begin(policy: Writer, ids: Tensor, mask: Tensor, texts: Tensor) -> Playing:
    """These texts with their prompts read."""
    width = int(mask[texts].sum(1).max())
    ids, mask = ids[texts, -width:], mask[texts, -width:]
    begun = Playing(text=texts, ids=ids, mask=mask, cache=DynamicCache(), logits=torch.empty(0))
    _read(policy, begun)
    return begun


def _read(policy: Writer, playing: Playing) -> None:
    """Let the network read the tokens that are not in the cache yet, and predict the next one."""
    known = playing.cache.get_seq_length()
    positions = (playing.mask.cumsum(1) - 1).clamp(min=0)[:, known:]
    playing.logits = policy.last_logits(
        input_ids=playing.ids[:, known:],
        attention_mask=playing.mask.long(),
        position_ids=positions,
        past_key_values=playing.cache,
        use_cache=True,
    )
