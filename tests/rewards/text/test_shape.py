"""Form, length and agreement of texts."""

import pytest
import torch

from rewards import score
from rewards.text.shape import LengthSwitch, Majority, SoftLength, TextFormat
from rewards.text.verifiers import ExactMatch


def test_format_is_of_the_whole_text() -> None:
    texts = ["<think>a\nb</think>\n<answer>4</answer>", "<answer>4</answer>", "<think></think><answer></answer>!", ""]
    assert score(TextFormat(), texts, ["?"] * 4, [{}] * 4).value.tolist() == [1, 0, 0, 0]
    assert score(TextFormat("[0-9]+"), ["12", "1a"], ["?"] * 2, [{}] * 2).value.tolist() == [1, 0]


def test_length_costs_between_free_and_limit() -> None:
    texts = ["", "x" * 10, "x" * 15, "x" * 20, "x" * 99]
    assert score(SoftLength(10, 20), texts, ["?"] * 5, [{}] * 5).value.tolist() == [0, 0, -0.5, -1, -1]
    with pytest.raises(ValueError, match="below limit"):
        SoftLength(20, 20)


def test_length_counts_only_where_a_group_is_mostly_right() -> None:
    verify = ExactMatch(pattern="([0-9])")
    texts = ["4", "..4", "....4", "5", "4", "5", "5", "...4"]
    prompts = ["2+2"] * 4 + ["3+1"] * 4
    scores = score(LengthSwitch(verify, 0.75, 0.5), texts, prompts, [{"answer": "4"}] * 8)
    assert scores.value.tolist() == [1, 0.75, 0.5, 0, 1, 0, 0, 1]
    assert scores.parts["exact_match"].tolist() == [1, 1, 1, 0, 1, 0, 0, 1]
    # all right and equally long: nothing to prefer
    same = score(LengthSwitch(verify), ["4", "4"], ["?"] * 2, [{"answer": "4"}] * 2)
    assert same.value.tolist() == [1, 1]


def test_the_majority_of_each_group_is_right() -> None:
    prompts = ["a"] * 5 + ["b"] * 3
    texts = ["x=1", "x=2", "x=1", "none", "x=1", "x=3", "x=4", ""]
    made = score(Majority("x=([0-9])"), texts, prompts, [{}] * 8).value
    assert torch.equal(made, torch.tensor([1.0, 0, 1, 0, 1, 1, 0, 0]))
