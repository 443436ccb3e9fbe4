"""What can be tested of vLLM without it: the request, the weights handed over, and how an answer becomes a rollout."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowalign.config import EngineSettings, load, recipe
from flowalign.data import ASSETS
from flowalign.data.batches import draw_batch
from flowalign.errors import ConfigError
from flowalign.policies.language.decoding import Decoding
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.vllm import VLLMEngine, as_rollout, hand_over, merged_weights, request
from flowalign.rollouts.draw import Draw
from tests.flowalign.small_run import small_run

PROMPTS = ["17+25=", "4-9=", "80+19=", "3+3="]
# fields of vllm.SamplingParams, as vLLM documents them
DOCUMENTED = """n temperature top_p top_k min_p seed stop stop_token_ids ignore_eos max_tokens min_tokens logprobs
    prompt_logprobs detokenize skip_special_tokens presence_penalty frequency_penalty repetition_penalty logit_bias
    allowed_token_ids bad_words""".split()


class StandIn:
    """Answers as vllm.LLM does, by another copy of the model, with log-probabilities a little off."""

    def __init__(self, policy: LanguagePolicy, off: float = 0.0) -> None:
        self.own = LanguagePolicy(copy.deepcopy(policy.network), policy.tokenizer)
        self.off, self.resets = off, 0

    def generate(self, prompts: list[dict[str, Any]], parameters: list[dict[str, Any]], use_tqdm: bool) -> list[Any]:
        answers = []
        for prompt, own in zip(prompts, parameters, strict=True):
            ids, mask = self.own.padded([prompt["prompt_token_ids"]], ["?"], own["max_tokens"])
            inputs = {"input_ids": ids, "attention_mask": mask.long()}
            made = self.own.generate(["?"], inputs, [own["seed"]], own["max_tokens"], Decoding(own["temperature"]), [])
            tokens = made.completion_ids[0][made.mask[0]].tolist()
            steps = [{t: SimpleNamespace(logprob=float(c) + self.off)} for t, c in zip(tokens, made.log_prob[0])]
            answers.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=steps)]))
        return answers

    def apply_model(self, function: Any) -> list[Any]:
        return [function(self)]

    def load_weights(self, weights: Any) -> None:
        self.own.network.load_state_dict(dict(weights))

    def reset_prefix_cache(self) -> None:
        self.resets += 1


@pytest.fixture
def policy() -> LanguagePolicy:
    return LanguagePolicy.from_pretrained(ASSETS / "tiny_lm")


def engine_of(policy: LanguagePolicy, off: float = 0.0) -> VLLMEngine:
    made = VLLMEngine.__new__(VLLMEngine)
    made.policy, made.parameters, made.model = policy, dict, StandIn(policy, off)
    return made


def test_requests_ask_for_the_models_own_distribution() -> None:
    made = request(2**63 + 5, 7, Decoding(0.8), [2])
    assert made.keys() <= set(DOCUMENTED)
    assert made["seed"] == 5 and made["max_tokens"] == 7 and made["temperature"] == 0.8
    assert made["top_p"] == 1 and made["top_k"] == 0 and made["min_p"] == 0 and made["stop_token_ids"] == [2]
    # 0 returns the drawn token's log-probability, None would return none
    assert made["logprobs"] == 0


def test_answers_become_the_rollout_that_the_policy_would_have_made(policy: LanguagePolicy) -> None:
    plain = policy.sample(PROMPTS, [0, 1, 2, 3], max_new_tokens=2, temperature=0.8)
    made = engine_of(policy).sample(PROMPTS, [0, 1, 2, 3], max_new_tokens=2, temperature=0.8, batch_size=9)
    for name in ("prompt_ids", "prompt_mask", "completion_ids", "mask", "ended"):
        assert torch.equal(getattr(made, name), getattr(plain, name)), name
    torch.testing.assert_close(made.log_prob, plain.log_prob, atol=1e-5, rtol=0)
    assert not made.ended.all() and made.decoding.temperature == 0.8


def test_the_engine_gets_lora_merged_and_the_network_stays_as_it_is(policy: LanguagePolicy) -> None:
    plain = copy.deepcopy(policy.network)
    policy.add_lora(4, 8)
    torch.manual_seed(0)
    for parameter in policy.trainable().values():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    before = {name: value.clone() for name, value in policy.network.state_dict().items()}
    plain.load_state_dict(dict(merged_weights(policy.network)))
    assert all(torch.equal(before[name], value) for name, value in policy.network.state_dict().items())
    ids = policy.encode(PROMPTS[:1], 5)[0]
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, policy.network(ids).logits, atol=1e-4, rtol=1e-4)
        with policy.reference():
            assert not torch.allclose(plain(ids).logits, policy.network(ids).logits, atol=1e-2)


def test_every_rollout_has_the_weights_of_now(policy: LanguagePolicy) -> None:
    engine = engine_of(policy)
    torch.manual_seed(0)
    for parameter in policy.network.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    made = engine.sample(PROMPTS, [0, 1, 2, 3], max_new_tokens=5, temperature=1.0, batch_size=9)
    assert torch.equal(made.completion_ids, policy.sample(PROMPTS, [0, 1, 2, 3], max_new_tokens=5).completion_ids)
    assert engine.model.resets == 1
    hand_over(policy.network, engine.model)
    assert engine.model.resets == 2


def test_training_weighs_what_the_engine_thought_otherwise_of(tmp_path: Path) -> None:
    run = small_run("tiny_lm/off_policy", tmp_path, "training.iterations=2")
    run.config.rollout.engine = EngineSettings(name="vllm")
    run.sampler._engine = engine_of(run.policy, off=0.1)
    experience = run.collect(Draw(run.sampler, run.scorer, draw_batch(run.prompts, 0, 4, 8, 0, False)))
    # pi_old / pi_sampler = exp(-0.1) everywhere
    assert experience.metrics["policy/off_policy_weight"] == pytest.approx(0.904837, abs=1e-4)
    assert experience.metrics["text/entropy"] > 0
    run.train()
    lines = run.metrics.read()
    assert all(line["policy/ratio"] == pytest.approx(1, abs=1e-5) for line in lines)
    assert run.sampler._engine.model.resets == 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], r"pip install 'flowalign\[vllm\]'"),
        (["algorithm.off_policy=null"], "off_policy={level: token}"),
    ],
)
def test_what_is_missing_is_said_in_one_line(overrides: list[str], message: str) -> None:
    config = load(recipe("tiny_lm/off_policy"), ["rollout.engine=vllm", *overrides])
    with pytest.raises(ConfigError, match=message) as raised:
        config.check(1)
    assert "\n" not in str(raised.value)


def test_an_answer_without_an_end_is_cut(policy: LanguagePolicy) -> None:
    step = {5: SimpleNamespace(logprob=-0.5)}
    answer = SimpleNamespace(outputs=[SimpleNamespace(token_ids=[5, 5], logprobs=[step, step])])
    ids, mask = policy.encode(["1+1="], 2)
    made = as_rollout(policy, ["1+1="], ids, mask, [answer], Decoding())
    assert made.ended.tolist() == [False] and made.log_prob.tolist() == [[-0.5, -0.5]]
