"""A frozen language model answers under a text, against transformers' own greedy generation."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flowalign import registry
from flowalign.data import ASSETS
from flowalign.policies.answering import Answered
from rewards import RewardError, score
from rewards.text.verifiers import ExactMatch

TINY = str(ASSETS / "tiny_lm")


def greedy(question: str) -> str:
    network = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    inputs = tokenizer(question, return_tensors="pt")
    ids = network.generate(**inputs, max_new_tokens=5, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def test_a_text_earns_what_the_answer_under_it_is_worth() -> None:
    reward = Answered("tiny_lm", ExactMatch(), template="{first}{text}=", max_new_tokens=5, device="cpu")
    texts = ["+25", "+24", "-5", "+25"]
    expected = [greedy(f"17{text}=") for text in texts]
    records = [{"first": 17, "answer": expected[0]}] * 4
    made = score(reward, texts, ["?"] * 4, records)
    assert [reply["answer"] for reply in made.replies] == expected
    assert made.value.tolist() == [float(answer == expected[0]) for answer in expected]
    gains = Answered("tiny_lm", ExactMatch(), "{first}{text}=", less="draft", max_new_tokens=5, device="cpu")
    drafts = [record | {"draft": expected[0] if i == 0 else "no"} for i, record in enumerate(records)]
    assert score(gains, texts, ["?"] * 4, drafts).value.tolist() == [0, *made.value.tolist()[1:]]


def test_what_is_missing_is_said() -> None:
    settings = {"model": "tiny_lm", "reward": {"name": "exact_match"}, "template": "{text}{draft}", "device": "cpu"}
    reward = registry.build("rewards", "answered", settings, "rewards.0")
    with pytest.raises(RewardError, match="has no 'draft'"):
        score(reward, ["1"], ["?"], [{"answer": "1"}])
    with pytest.raises(ValueError, match="has {text}"):
        Answered("tiny_lm", ExactMatch(), template="{prompt}")
