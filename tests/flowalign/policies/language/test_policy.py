"""The language policy on fresh tiny models: what was recorded is what a plain forward pass says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedTokenizerFast,
)

from flowalign.errors import ConfigError, FlowalignError
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.rollout import TextRollout

ALPHABET = "<>/abcdefgh+"
PROMPTS = ["a+b", "abcdefg", "c", "a+b"]
SAMPLING = {"max_new_tokens": 9, "temperature": 0.7}


def tokenizer(**settings: Any) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({t: i for i, t in enumerate(["<p>", "<e>", *ALPHABET])}, unk_token="<p>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<p>", eos_token="<e>", **settings)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(1)
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"vocab_size": 14, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    network = LlamaForCausalLM(LlamaConfig(**size, **ids, max_position_embeddings=24, initializer_range=0.25))
    return network


def gpt2() -> GPT2LMHeadModel:
    """Learned positions, which tell padding on the wrong side."""
    torch.manual_seed(1)
    ids = {"vocab_size": 14, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=24, initializer_range=0.25, **ids))


Maker = Callable[[], Any]


def plain_log_probs(network: Any, rollout: TextRollout, row: int) -> torch.Tensor:
    """One row alone, without padding or cache."""
    prompt = rollout.prompt_ids[row][rollout.prompt_mask[row]]
    completion = rollout.completion_ids[row][rollout.mask[row]]
    with torch.no_grad():
        logits = network(torch.cat([prompt, completion])[None]).logits[0]
    log_probs = (logits / rollout.decoding.temperature).log_softmax(-1)[len(prompt) - 1 : -1]
    return log_probs.gather(1, completion[:, None])[:, 0]


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("padding", ["left", "right"])
def test_sampled_log_probs_are_those_of_a_plain_forward_pass(make: Maker, padding: Any) -> None:
    policy = LanguagePolicy(make(), tokenizer(), padding=padding)
    rollout = policy.sample(PROMPTS * 4, list(range(16)), batch_size=5, **SAMPLING)
    assert rollout.ended.any() and not rollout.ended.all()
    again, entropy = policy.log_probs(rollout, torch.arange(16))
    torch.testing.assert_close(again, rollout.log_prob, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, rollout.entropy, atol=1e-5, rtol=0)
    for row in range(16):
        mask = rollout.mask[row]
        expected = plain_log_probs(policy.network, rollout, row)
        torch.testing.assert_close(rollout.log_prob[row][mask], expected, atol=1e-5, rtol=0)
        assert not rollout.log_prob[row][~mask].any()
        assert mask.sum() == len(expected) and not mask[int(mask.sum()) :].any()
    assert policy.verify(rollout) < 1e-5


def test_a_text_depends_on_its_prompt_and_seed_alone() -> None:
    policy = LanguagePolicy(llama(), tokenizer())
    together = policy.decode(policy.sample(PROMPTS, [5, 6, 7, 5], **SAMPLING))
    apart = [policy.decode(policy.sample([p], [s], **SAMPLING))[0] for p, s in zip(PROMPTS, [5, 6, 7, 5], strict=True)]
    assert together == apart and together[0] == together[3]
    assert len(set(policy.decode(policy.sample(["a+b"] * 8, list(range(8)), **SAMPLING)))) > 4


def test_draws_follow_the_distribution() -> None:
    policy = LanguagePolicy(llama(), tokenizer())
    rollout = policy.sample(["a+b"] * 4000, list(range(4000)), max_new_tokens=1, batch_size=4000)
    share = torch.bincount(rollout.completion_ids[:, 0], minlength=14) / 4000
    ids, _ = policy.encode(["a+b"], 1)
    with torch.no_grad():
        probability = policy.network(ids).logits[0, -1].softmax(-1)
    # a token's share has a standard error of at most 0.008
    torch.testing.assert_close(share, probability, atol=0.03, rtol=0)


def test_temperature_zero_is_transformers_greedy_search() -> None:
    policy = LanguagePolicy(llama(), tokenizer())
    rollout = policy.sample(PROMPTS, [0] * 4, max_new_tokens=6, temperature=0)
    for row, prompt in enumerate(PROMPTS):
        ids = torch.tensor([tokenizer()(prompt).input_ids])
        made = policy.network.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        assert rollout.completion_ids[row][rollout.mask[row]].tolist() == made.tolist()


def test_texts_that_end_at_once_or_not_at_all() -> None:
    network = llama()
    network.lm_head.weight.data.zero_()
    bias = torch.zeros(14)
    network.lm_head.bias = torch.nn.Parameter(bias)
    bias[1] = 50.0
    policy = LanguagePolicy(network, tokenizer())
    empty = policy.sample(PROMPTS, [0] * 4, **SAMPLING)
    assert policy.decode(empty) == [""] * 4 and empty.ended.all() and empty.mask.sum(1).tolist() == [1] * 4
    bias[1] = -50.0
    cut = policy.sample(PROMPTS, [0] * 4, **SAMPLING)
    assert not cut.ended.any() and cut.mask.all() and cut.mask.shape[1] == 9


def test_a_prompt_longer_than_the_context_says_so() -> None:
    policy = LanguagePolicy(llama(), tokenizer())
    with pytest.raises(ConfigError, match="20 tokens and max_new_tokens=9 do not fit into the model's context of 24"):
        policy.sample(["ab" * 10], [0], **SAMPLING)


def test_the_reference_is_the_start_with_an_adapter_and_without() -> None:
    for lora in (True, False):
        policy = LanguagePolicy(llama(), tokenizer())
        rollout = policy.sample(PROMPTS, list(range(4)), **SAMPLING)
        if lora:
            policy.add_lora(4, 8)
        else:
            policy.keep_reference()
            policy.train_all()
        names = policy.trainable()
        assert names and all(("lora" in name) == lora for name in names)
        with torch.no_grad():
            for parameter in names.values():
                parameter.add_(0.1 * torch.randn_like(parameter))
        rows = torch.arange(4)
        with torch.no_grad():
            moved, _ = policy.log_probs(rollout, rows)
            with policy.reference():
                kept, _ = policy.log_probs(rollout, rows)
        torch.testing.assert_close(kept, rollout.log_prob, atol=1e-5, rtol=0)
        assert (moved - kept).abs().max() > 1e-2
        with pytest.raises(FlowalignError, match="differ"):
            policy.verify(rollout)


def test_what_is_saved_loads_in_plain_transformers(tmp_path: Any) -> None:
    for lora in (True, False):
        policy = LanguagePolicy(llama(), tokenizer())
        policy.add_lora(4, 8) if lora else policy.train_all()
        with torch.no_grad():
            for parameter in policy.trainable().values():
                parameter.add_(0.1 * torch.randn_like(parameter))
        rollout = policy.sample(PROMPTS, list(range(4)), **SAMPLING)
        folder = tmp_path / str(lora)
        policy.save(folder)
        fresh = LanguagePolicy(llama(), tokenizer())
        fresh.load(folder)
        again, _ = fresh.log_probs(rollout, torch.arange(4))
        torch.testing.assert_close(again, rollout.log_prob, atol=1e-5, rtol=0)


def test_a_chat_gets_its_template() -> None:
    template = "{% for turn in messages %}<{{ turn['content'] }}>{% endfor %}{% if add_generation_prompt %}+{% endif %}"
    policy = LanguagePolicy(llama(), tokenizer(chat_template=template), chat=True, system="a")
    ids, mask = policy.encode(["bc"], 3)
    assert policy.tokenizer.decode(ids[0][mask[0]]) == "<a><bc>+"
    with pytest.raises(ConfigError, match="no chat template"):
        LanguagePolicy(llama(), tokenizer(), chat=True)
    # as Gemma's template does
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    gemma = LanguagePolicy(llama(), tokenizer(chat_template=strict + template), chat=True, system="a")
    with pytest.raises(ConfigError, match="'System role not supported'; model.system=null works, with its words in"):
        gemma.encode(["bc"], 3)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_an_empty_prompt_is_the_beginning_of_a_text(padding: Any) -> None:
    policy = LanguagePolicy(llama(), tokenizer(), padding=padding)
    rollout = policy.sample(["", "abcd", ""], [0, 1, 0], **SAMPLING)
    assert policy.verify(rollout) < 1e-5 and policy.decode(rollout)[0] == policy.decode(rollout)[2]
    alone = policy.sample([""], [0], **SAMPLING)
    assert alone.prompt_ids.tolist() == [[policy.tokenizer.eos_token_id]]
    torch.testing.assert_close(alone.log_prob[0], rollout.log_prob[0][: alone.mask.shape[1]], atol=1e-5, rtol=0)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_what_is_drawn_by_a_rule_is_scored_by_it(padding: Any) -> None:
    policy = LanguagePolicy(llama(), tokenizer(), padding=padding)
    rule = {"temperature": 0.9, "top_p": 0.8, "top_k": 6, "min_p": 0.05, "repetition_penalty": 1.5}
    rollout = policy.sample(PROMPTS, list(range(4)), max_new_tokens=9, **rule)
    assert policy.verify(rollout) < 1e-5
    # by transformers' own processors, the row alone
    network, row = policy.network, 1
    prompt = rollout.prompt_ids[row][rollout.prompt_mask[row]]
    for t, token in enumerate(rollout.completion_ids[row][rollout.mask[row]].tolist()):
        before = torch.cat([prompt, rollout.completion_ids[row][:t]])[None]
        settings = GenerationConfig(do_sample=True, output_scores=True, return_dict_in_generate=True, **rule)
        settings.max_new_tokens = 1
        made = network.generate(before, generation_config=settings)
        expected = made.scores[0][0].log_softmax(-1)[token]
        torch.testing.assert_close(rollout.log_prob[row, t], expected, atol=1e-5, rtol=0)


def test_a_models_own_generation_config_has_no_part_in_sampling() -> None:
    network = llama()
    plain = LanguagePolicy(llama(), tokenizer()).sample(PROMPTS, list(range(4)), **SAMPLING)
    own = {"repetition_penalty": 1.3, "top_p": 0.5, "top_k": 2, "min_new_tokens": 4, "do_sample": True}
    network.generation_config.update(**own)
    policy = LanguagePolicy(network, tokenizer())
    rollout = policy.sample(PROMPTS, list(range(4)), **SAMPLING)
    assert torch.equal(rollout.completion_ids, plain.completion_ids)
    assert torch.equal(rollout.log_prob, plain.log_prob) and policy.verify(rollout) < 1e-5
    assert network.generation_config.top_p == 0.5


@pytest.mark.parametrize("make", [llama, gpt2])
def test_checkpointed_gradients_are_the_same_and_keep_little(make: Maker) -> None:
    from tests.flowalign.policies.language.test_head import saved

    kept, gradients = [], []
    for checkpointed in (False, True):
        policy = LanguagePolicy(make(), tokenizer())
        rollout = policy.sample(PROMPTS, list(range(4)), **SAMPLING)
        policy.train_all()
        if checkpointed:
            policy.checkpoint_gradients()

        def forward(policy: LanguagePolicy = policy, rollout: TextRollout = rollout) -> torch.Tensor:
            return policy.log_probs(rollout, torch.arange(4))[0]

        kept.append(saved(forward))
        forward().sum().backward()
        gradients.append({name: p.grad for name, p in policy.trainable().items()})
        assert policy.verify(rollout) < 1e-5
    assert kept[1] < 0.35 * kept[0]
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected)


def test_lora_says_what_it_adapts_and_may_adapt_all(caplog: pytest.LogCaptureFixture) -> None:
    """Phi-3 has one layer for queries, keys and values."""
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    ids = {"vocab_size": 14, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}

    def adapted(targets: Any) -> set[str]:
        policy = LanguagePolicy(Phi3ForCausalLM(Phi3Config(**size, **ids)), tokenizer())
        policy.add_lora(2, 4, targets)
        return {name.split(".lora_A")[0].rpartition(".")[2] for name in policy.trainable() if "lora_A" in name}

    assert adapted(None) == {"o_proj"}
    assert "LoRA adapts o_proj alone, for the model has no q_proj, k_proj, v_proj" in caplog.text
    assert "all-linear adapts down_proj, gate_up_proj, qkv_proj too" in caplog.text
    caplog.clear()
    assert adapted("all-linear") == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    assert adapted(["qkv_proj"]) == {"qkv_proj"} and not caplog.text
    LanguagePolicy(llama(), tokenizer()).add_lora(2, 4)
    assert not caplog.text


def test_training_starts_from_an_adapter_which_the_reference_keeps(tmp_path: Path) -> None:
    first = LanguagePolicy(llama(), tokenizer())
    first.add_lora(2, 3.0, "all-linear")
    with torch.no_grad():
        for parameter in first.trainable().values():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    first.save(tmp_path / "first")
    rollout = first.sample(PROMPTS, [1, 2, 3, 4], **SAMPLING)
    rows = torch.arange(len(PROMPTS))
    policy = LanguagePolicy(llama(), tokenizer())
    policy.start_from_lora(tmp_path / "first")
    start = policy.log_probs(rollout, rows)[0].detach()
    torch.testing.assert_close(start, first.log_probs(rollout, rows)[0].detach())
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.mul_(1.5)
        with policy.reference():
            assert torch.equal(policy.log_probs(rollout, rows)[0], start)
    trained = policy.log_probs(rollout, rows)[0].detach()
    assert not torch.allclose(trained, start, atol=1e-3)
    policy.save(tmp_path / "second")
    again = LanguagePolicy(llama(), tokenizer())
    again.load(tmp_path / "second")
    torch.testing.assert_close(again.log_probs(rollout, rows)[0].detach(), trained)
