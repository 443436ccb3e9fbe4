"""Scores of tokens without all of their logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from flowalign.policies.language import head
from flowalign.policies.language.decoding import Decoding
from flowalign.policies.language.policy import LanguagePolicy
from tests.flowalign.policies.language.test_policy import PROMPTS, SAMPLING, llama, plain_log_probs, tokenizer


def saved(run: Callable[[], Any]) -> int:
    """Bytes that a computation keeps for its backward pass, those of parameters left out."""
    kept: dict[int, int] = {}

    def keep(value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, torch.nn.Parameter):
            kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        run()
    return sum(kept.values())


def test_chunks_have_the_same_scores_and_gradients_and_keep_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = torch.randn(300, 8, requires_grad=True), torch.randn(500, 8, requires_grad=True)
    tokens, rule = torch.randint(500, (300,)), Decoding(0.7, top_p=0.9)

    def scores() -> tuple[torch.Tensor, torch.Tensor]:
        return head.token_scores(hidden, lambda some: some @ weight.T, 500, tokens, rule)

    def gradients() -> list[torch.Tensor]:
        log_prob, entropy = scores()
        assert not entropy.requires_grad
        return [log_prob, entropy, *torch.autograd.grad(log_prob.square().sum(), [hidden, weight])]

    whole, kept = gradients(), saved(scores)
    monkeypatch.setattr(head, "LOGITS", 16 * 500)
    for made, expected in zip(gradients(), whole, strict=True):
        torch.testing.assert_close(made, expected, atol=1e-4, rtol=1e-5)
    logits = 300 * 500 * 4
    assert kept > logits and saved(scores) < 0.1 * logits


@pytest.mark.skipif(not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="this torch has none")
def test_chunks_agree_with_torchs_fused_linear_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "LOGITS", 16 * 500)
    hidden, weight = torch.randn(64, 8, requires_grad=True), torch.randn(500, 8, requires_grad=True)
    tokens, upstream = torch.randint(500, (64,)), torch.randn(64)
    log_prob, _ = head.token_scores(hidden, lambda some: some @ weight.T, 500, tokens, Decoding())
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=16)
    fused = -torch.nn.functional.linear_cross_entropy(hidden, weight, tokens, reduction="none", options=options)
    torch.testing.assert_close(log_prob, fused, atol=1e-5, rtol=0)
    for own, expected in zip(
        torch.autograd.grad(log_prob, [hidden, weight], upstream),
        torch.autograd.grad(fused, [hidden, weight], upstream),
        strict=True,
    ):
        torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-5)


def test_a_network_that_changes_its_heads_logits_is_scored_by_what_it_gives() -> None:
    """Gemma 2 caps them."""
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8}
    ids = {"vocab_size": 14, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "num_key_value_heads": 2}
    config = Gemma2Config(**size, **ids, max_position_embeddings=24, final_logit_softcapping=2.0, initializer_range=1.0)
    policy = LanguagePolicy(Gemma2ForCausalLM(config), tokenizer())
    assert not head.gives_logits(policy.network) and head.gives_logits(llama())
    rollout = policy.sample(PROMPTS, list(range(4)), **SAMPLING)
    assert policy.verify(rollout) < 1e-5
    expected = plain_log_probs(policy.network, rollout, 0)
    torch.testing.assert_close(rollout.log_prob[0][rollout.mask[0]], expected, atol=1e-5, rtol=0)
