"""Continuous batching: the texts and log-probabilities of `generate`, in fewer rows of network calls."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM, MistralConfig, MistralForCausalLM

from flowalign.config import load, recipe
from flowalign.data import ASSETS
from flowalign.errors import ConfigError
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.teacher_forcing import continued
from flowalign.training import Trainer

from .test_policy import PROMPTS, gpt2, llama, tokenizer

IDS = {"vocab_size": 14, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
SAMPLING = {"max_new_tokens": 9, "temperature": 0.7, "batch_size": 5}


def windowed() -> MistralForCausalLM:
    """Attention to the last four tokens alone."""
    torch.manual_seed(1)
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(**size, **IDS, num_key_value_heads=2, sliding_window=4, initializer_range=0.25)
    return MistralForCausalLM(config)


@pytest.mark.parametrize("make", [llama, gpt2, windowed])
def test_texts_are_those_of_generate_and_log_probs_those_of_a_replay(make: Callable[[], Any]) -> None:
    policy = LanguagePolicy(make(), tokenizer())
    prompts, seeds = PROMPTS * 6, list(range(24))
    waiting = policy.sample(prompts, seeds, repetition_penalty=1.2, **SAMPLING)
    refilled = policy.sample(prompts, seeds, repetition_penalty=1.2, continuous_batching=True, **SAMPLING)
    assert len(refilled.mask.sum(1).unique()) > 2 and refilled.prompts == waiting.prompts
    for name in ("prompt_ids", "prompt_mask", "completion_ids", "mask", "ended"):
        assert torch.equal(getattr(refilled, name), getattr(waiting, name)), name
    again, entropy = policy.log_probs(refilled, torch.arange(24))
    torch.testing.assert_close(again, refilled.log_prob, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, refilled.entropy, atol=1e-5, rtol=0)


def test_the_shipped_models_log_probs_are_replayed_to_a_millionth() -> None:
    policy = LanguagePolicy.from_pretrained(ASSETS / "tiny_lm")
    sums = [f"{a}+{b}=" for a in (7, 15, 48) for b in (6, 23, 39, 71)]
    sampled = policy.sample(sums, list(range(12)), max_new_tokens=5, batch_size=4, continuous_batching=True)
    again, _ = policy.log_probs(sampled, torch.arange(12))
    torch.testing.assert_close(again, sampled.log_prob, atol=1e-6, rtol=1e-6)


def test_no_text_waits_for_the_longest() -> None:
    policy = LanguagePolicy(llama(), tokenizer())
    rows: list[int] = []
    policy.network.register_forward_hook(lambda _, __, made: rows.append(len(made.logits)))
    sampled = policy.sample(PROMPTS * 6, list(range(24)), continuous_batching=True, **SAMPLING)
    # one prediction a token that was drawn, and no more than five at once
    assert sum(rows) == int(sampled.mask.sum()) and max(rows) == 5
    waiting = sum(rows)
    rows.clear()
    policy.sample(PROMPTS * 6, list(range(24)), **SAMPLING)
    assert sum(rows) > 1.2 * waiting


def test_beginnings_go_on_as_without() -> None:
    policy = LanguagePolicy(llama(), tokenizer())
    prefixes = [[3, 4], [5], [], [6, 7, 8]]
    given = {"max_new_tokens": 6, "batch_size": 2}
    plain, refilled = (
        continued(policy, PROMPTS, prefixes, [1, 2, 3, 4], continuous_batching=on, **given) for on in (False, True)
    )
    assert torch.equal(plain.completion_ids, refilled.completion_ids)


def test_what_it_does_not_do_is_said() -> None:
    network = MambaForCausalLM(MambaConfig(**IDS, hidden_size=16, state_size=4, num_hidden_layers=1))
    with pytest.raises(ConfigError, match=r"continuous_batching: this network remembers more .* false works"):
        LanguagePolicy(network, tokenizer()).sample(PROMPTS, [0] * 4, continuous_batching=True, **SAMPLING)
    engine = "rollout.engine={name: vllm, url: 'http://127.0.0.1:9'}"
    config = load(recipe("tiny_lm/grpo"), ["rollout.continuous_batching=true", engine])
    with pytest.raises(ConfigError, match="rollout.continuous_batching: works by transformers"):
        Trainer(config)
    shown = load(recipe("tiny_vlm/judge"), ["evaluation.continuous_batching=true"])
    with pytest.raises(ConfigError, match="evaluation.continuous_batching: works without pictures"):
        shown.check(processes=1)
