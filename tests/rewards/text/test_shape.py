"""Form, length and agreement of texts."""

import re
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from rewards import RewardError, bind, score
from rewards.text.model import CausalModel
from rewards.text.shape import LengthSwitch, Majority, SoftLength, TextFormat
from rewards.text.verifiers import ExactMatch


def test_format_is_of_the_whole_text() -> None:
    texts = ["<think>a\nb</think>\n<answer>4</answer>", "<answer>4</answer>", "<think></think><answer></answer>!", ""]
    assert score(TextFormat(), texts, ["?"] * 4, [{}] * 4).value.tolist() == [1, 0, 0, 0]
    assert score(TextFormat("[0-9]+"), ["12", "1a"], ["?"] * 2, [{}] * 2).value.tolist() == [1, 0]


def test_length_costs_between_free_and_limit_in_tokens(model: CausalModel) -> None:
    texts = ["", "1" * 10, "1" * 15, "1" * 20, "1" * 99]
    reward = SoftLength(10, 20)
    with pytest.raises(RewardError, match="`tokenizer: PATH` names one"):
        score(reward, texts, ["?"] * 5, [{}] * 5)
    bind(reward, model)
    assert score(reward, texts, ["?"] * 5, [{}] * 5).value.tolist() == [0, 0, -0.5, -1, -1]
    # a token of two characters
    pairs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"11": 0}, unk_token="11")))
    pairs.backend_tokenizer.pre_tokenizer = Split(Regex(".."), "isolated")
    reward.tokenizer = pairs
    assert score(reward, texts, ["?"] * 5, [{}] * 5).value.tolist() == [0, 0, 0, 0, -1]
    with pytest.raises(ValueError, match="below limit"):
        SoftLength(20, 20)


def test_length_counts_only_where_a_group_is_mostly_right() -> None:
    verify = ExactMatch(pattern="([0-9])")
    texts = ["4", "..4", "....4", "5", "4", "5", "5", "...4"]
    prompts = ["2+2"] * 4 + ["3+1"] * 4
    scores = score(LengthSwitch(verify, 0.75, 0.5), texts, prompts, [{"answer": "4"}] * 8)
    assert scores.value.tolist() == [1, 0.75, 0.5, 0, 1, 0, 0, 1]
    assert scores.parts["exact_match"].tolist() == [1, 1, 1, 0, 1, 0, 0, 1]
    # in tokens of the model that is trained, here of up to four characters: 1, 1, 2; and 1, 1
    switch = LengthSwitch(verify, 0.75, 0.5)
    bind(switch, SimpleNamespace(tokenizer=lambda text, **_: SimpleNamespace(input_ids=re.findall(".{1,4}", text))))
    assert score(switch, texts, prompts, [{"answer": "4"}] * 8).value.tolist() == [1, 1, 0.5, 0, 1, 0, 0, 1]
    # all right and equally long: nothing to prefer
    same = score(LengthSwitch(verify), ["4", "4"], ["?"] * 2, [{"answer": "4"}] * 2)
    assert same.value.tolist() == [1, 1]


def test_the_majority_of_each_group_is_right() -> None:
    prompts = ["a"] * 5 + ["b"] * 3
    texts = ["x=1", "x=2", "x=1", "none", "x=1", "x=3", "x=4", ""]
    made = score(Majority("x=([0-9])"), texts, prompts, [{}] * 8).value
    assert torch.equal(made, torch.tensor([1.0, 0, 1, 0, 1, 1, 0, 0]))
