"""Answers of servers of texts as data: those that vLLM 0.32.0 gave, and those that are wrong."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from flowalign.policies.language.decoding import Decoding
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.teacher_forcing import demonstrated, rescored
from flowalign.training.engines import sglang_texts, vllm_texts
from flowalign.training.engines.compared import all_alike
from flowalign.training.engines.completions import DrawnText, Wanted, read
from flowalign.training.engines.servers import OURS
from tests.flowalign.training.engines.record_texts import ADAPTER, DECODINGS, PROMPTS, adapted, wanted

FOLDER = Path(__file__).parent
VLLM = json.loads((FOLDER / "vllm-0.32.0.json").read_text())
SGLANG = json.loads((FOLDER / "sglang-0.5.23-texts.json").read_text())


@pytest.fixture(scope="module")
def policy() -> LanguagePolicy:
    return adapted()


def exchanges(path: str, status: int = 200) -> list[dict[str, Any]]:
    return [each for each in VLLM["exchanges"] if (each["path"], each["status"]) == (path, status)]


def rollout_of(policy: LanguagePolicy, prompts: list[str], texts: list[DrawnText], decoding: Decoding) -> Any:
    """The texts as if the policy had drawn them."""
    made = demonstrated(policy, prompts, ["1" * (len(text.tokens) - 1) for text in texts], decoding=decoding)
    for row, text in enumerate(texts):
        made.completion_ids[row, : len(text.tokens)] = torch.tensor(text.tokens)
        made.log_prob[row, : len(text.tokens)] = torch.tensor(text.log_prob)
    return made


@pytest.mark.parametrize("number", range(len(DECODINGS)))
def test_log_probabilities_of_vllm_are_those_of_a_replay(policy: LanguagePolicy, number: int) -> None:
    asked = exchanges("/v1/completions")[number * len(PROMPTS) : (number + 1) * len(PROMPTS)]
    texts = [
        read(json.dumps(each["answer"]).encode(), wanted(policy, prompt))[0]
        for each, prompt in zip(asked, PROMPTS, strict=True)
    ]
    made = rollout_of(policy, PROMPTS, texts, DECODINGS[number])
    with policy.reference():
        again = rescored(policy, made)
    torch.testing.assert_close(again.log_prob, made.log_prob, atol=1e-5, rtol=0)


def test_log_probabilities_of_an_adapter_are_those_of_a_replay(policy: LanguagePolicy) -> None:
    asked = [each for each in exchanges("/v1/completions") if each["answer"]["model"] == ADAPTER]
    texts = [
        read(json.dumps(each["answer"]).encode(), wanted(policy, prompt))[0]
        for each, prompt in zip(asked, PROMPTS, strict=True)
    ]
    made = rollout_of(policy, PROMPTS, texts, Decoding())
    torch.testing.assert_close(rescored(policy, made).log_prob, made.log_prob, atol=1e-5, rtol=0)
    with policy.reference():
        assert (rescored(policy, made).log_prob - made.log_prob).abs().max() > 0.1


def test_requests_have_the_fields_of_the_real_servers(policy: LanguagePolicy) -> None:
    ours = vllm_texts.request("m", wanted(policy, "1+1="), 5, Decoding(top_k=3))
    assert ours.keys() <= set(VLLM["fields"]["CompletionRequest"])
    assert ours["seed"] == 5 and ours["top_k"] == 3 and ours["logprobs"] == 0 and ours["ignore_eos"]
    assert ours | asdict(Decoding(top_k=3)) == ours
    # what was recorded is what is sent
    first = exchanges("/v1/completions")[0]["request"]
    assert first == vllm_texts.request("tiny_lm", wanted(policy, PROMPTS[0]), 0, Decoding())
    ours = sglang_texts.request("m", "a", wanted(policy, "1+1="), 5, Decoding(temperature=0.7))
    assert ours.keys() <= set(SGLANG["fields"]["CompletionRequest"])
    assert ours["top_k"] == -1 and "ignore_eos" not in ours
    assert {"token_ids", "prompt_token_ids", "logprobs"} <= set(SGLANG["fields"]["CompletionResponseChoice"])
    assert {"lora_name", "lora_path"} <= set(SGLANG["fields"]["LoadLoRAAdapterReqInput"])
    assert {"model_path", "weight_version", "flush_cache"} <= set(SGLANG["fields"]["UpdateWeightFromDiskReqInput"])
    assert {"/load_lora_adapter", "/unload_lora_adapter", "/model_info", "/v1/models"} <= set(SGLANG["routes"])


def test_vllm_says_in_its_own_words_what_is_amiss() -> None:
    [again], [none] = exchanges("/v1/load_lora_adapter", 400), exchanges("/v1/load_lora_adapter", 404)
    [lost] = exchanges("/v1/completions", 404)
    assert "already been loaded" in again["answer"]["error"]["message"]
    assert "No adapter found" in none["answer"]["error"]["message"]
    named = json.dumps(lost["answer"]).replace(ADAPTER, "flowalign-0123456789abcdef").encode()
    assert OURS.search(named)
    cards = exchanges("/v1/models")[1]["answer"]["data"]
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        ("tiny_lm", "MODEL", None),
        (ADAPTER, "ADAPTER", "tiny_lm"),
    ]


WANTED = Wanted([1, 4, 10], 4, [2], 16)
CHOICE: dict[str, Any] = {
    "token_ids": [5, 6, 2],
    "prompt_token_ids": [1, 4, 10],
    "logprobs": {"token_logprobs": [-0.1, -0.2, 0.0]},
    "finish_reason": "stop",
}


def answer(**changes: Any) -> bytes:
    return json.dumps({"choices": [CHOICE | changes]}).encode()


def test_a_sound_answer_is_read() -> None:
    assert read(answer(), WANTED)[0] == DrawnText([5, 6, 2], [-0.1, -0.2, 0.0], True)
    chances = {"token_logprobs": [-1.0] * 4}
    cut = answer(token_ids=[5, 6, 5, 6], logprobs=chances, finish_reason="length")
    assert read(cut, WANTED)[0] == DrawnText([5, 6, 5, 6], [-1.0] * 4, False)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>", "no completion of one text"),
        (b"[" * 100_000, "no completion of one text"),
        (b'{"choices": []}', "no completion of one text"),
        (json.dumps({"choices": [CHOICE, CHOICE]}).encode(), "no completion of one text"),
        (answer(token_ids=None), "no token_ids"),
        (answer(token_ids=[]), "token_ids are not"),
        (answer(token_ids=[5, 16, 2]), "below the vocabulary's 16"),
        (answer(token_ids=[5, -1, 2]), "below the vocabulary's 16"),
        (answer(token_ids=[5, True, 2]), "below the vocabulary's 16"),
        (answer(token_ids="562"), "token_ids are not"),
        (answer(logprobs=None), "ignores logprobs"),
        (answer(logprobs={"token_logprobs": [-0.1, -0.2]}), "not as many as its 3 tokens"),
        (answer(logprobs={"token_logprobs": [-0.1, None, 0.0]}), "no finite number up to 0"),
        (answer(logprobs={"token_logprobs": [-0.1, float("nan"), 0.0]}), "no finite number up to 0"),
        (answer(logprobs={"token_logprobs": [-0.1, 0.5, 0.0]}), "no finite number up to 0"),
        # what vLLM says instead of -inf
        (answer(logprobs={"token_logprobs": [-0.1, -9999.0, 0.0]}), "no finite number up to 0"),
        (answer(prompt_token_ids=[4, 10]), "changed or cut the prompt"),
        (answer(token_ids=[5, 2, 2]), "ignores stop_token_ids"),
        (answer(token_ids=[5, 6, 7]), r"stops after 3 of 4 tokens .*'stop'"),
        (answer(token_ids=[5] * 5, logprobs={"token_logprobs": [-1.0] * 5}), "at most 4 were asked for"),
    ],
)
def test_a_wrong_answer_is_said_to_be_wrong(body: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        read(body, WANTED)
    assert "\n" not in str(raised.value)


def test_draws_that_are_alike_are_so_by_chance_where_they_are_probable() -> None:
    texts = [[4, 2], [4, 2], [5, 2], [5, 2]]
    assert all_alike(texts, [-21.0] * 4, [0, 0, 1, 1])
    assert not all_alike(texts, [-9.0] * 4, [0, 0, 1, 1])
    assert not all_alike(texts, [-21.0] * 4, [0, 0, 0, 1])
