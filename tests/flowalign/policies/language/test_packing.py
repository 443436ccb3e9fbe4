"""Packed texts: the numbers of padded ones, in five families, and fewer tokens."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from flowalign.errors import ConfigError
from flowalign.policies.language.packing import packed
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.teacher_forcing import demonstrated
from tests.flowalign.policies.language.test_policy import tokenizer

PROMPTS = ["a+b", "abcdefg", "c", "a+b", "hg", "abc"]
TEXTS = ["c", "bb", "abcabcabc", "d+e", "f", "abcdefghab"]
IDS = {"vocab_size": 14, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
SIZE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.25,
}
FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZE, **IDS),
    "qwen3": lambda: Qwen3Config(**SIZE, **IDS),
    # a window shorter than the texts
    "mistral": lambda: MistralConfig(**SIZE, **IDS, sliding_window=4),
    # caps its logits
    "gemma2": lambda: Gemma2Config(**SIZE, **IDS, sliding_window=4),
    "gpt2": lambda: GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=32, initializer_range=0.25, **IDS),
}


def policy(name: str, padding: Any) -> LanguagePolicy:
    torch.manual_seed(1)
    return LanguagePolicy(AutoModelForCausalLM.from_config(FAMILIES[name]()).double(), tokenizer(), padding=padding)


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_texts_have_the_numbers_of_padded_ones(name: str) -> None:
    made = []
    for padding in ("left", "packed"):
        own = policy(name, padding)
        own.train_all()
        rollout = demonstrated(own, PROMPTS, TEXTS)
        log_prob, entropy = own.log_probs(rollout, torch.arange(len(TEXTS)))
        loss = -log_prob[rollout.mask].mean()
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in own.trainable().values() if p.grad is not None])
        made.append((log_prob, entropy, gradient))
    for padded, joined in zip(*made, strict=True):
        torch.testing.assert_close(joined, padded, atol=1e-6, rtol=1e-5)


def test_texts_fill_rows_without_overlapping() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 0, 0], [1, 0, 0, 0, 0]]).bool()
    ids = torch.arange(1, 21).view(4, 5).where(mask, 0)
    made = packed(ids, mask)
    assert made.input_ids.tolist() == [[6, 7, 8, 9, 10], [3, 4, 5, 12, 13], [16, 0, 0, 0, 0]]
    assert made.position_ids.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 0, 1], [0, 0, 1, 2, 3]]
    assert (made.row.tolist(), made.first.tolist()) == ([1, 0, 1, 2], [0, 0, 3, 0])


def test_a_network_without_attention_is_refused() -> None:
    network = AutoModelForCausalLM.from_config(MambaConfig(hidden_size=16, num_hidden_layers=1, state_size=4, **IDS))
    with pytest.raises(ConfigError, match="cannot tell texts apart"):
        LanguagePolicy(network, tokenizer(), padding="packed")
