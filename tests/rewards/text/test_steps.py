"""Rewards of steps: literal versions, and what they promise of sums."""

import math

import pytest
import torch

from rewards import END, Scores, Spec, WeightedSum, as_reward, score
from rewards.text.model import CausalModel
from rewards.text.steps import (
    ClipBound,
    DeltaBound,
    Gated,
    ImplicitPRM,
    InformationGain,
    PathFaithfulness,
    TrustWeighted,
    step_ends,
)
from rewards.text.verifiers import ExactMatch
from tests.rewards.text.test_likelihood import one_by_one

CHARACTER = "(?<=.)"


class Steps:
    """Given rewards of each text's steps, two characters each."""

    name = "steps"
    spec = Spec(frozenset({"text", "prompt"}))

    def __init__(self, rows: list[list[float]]) -> None:
        self.rows = rows

    def __call__(self, samples, prompts, metadata):  # type: ignore[no-untyped-def]
        steps = [[(2 * k + 2, value) for k, value in enumerate(row)] for row in self.rows]
        return Scores(torch.tensor([sum(row) for row in self.rows]), steps=steps)


def right(texts: list[str], prompts: list[str]) -> list[float]:
    return [float(text == "abcd") for text in texts]


def test_steps_end_after_their_separator() -> None:
    assert step_ends("one\ntwo\n\nthree") == [4, 9, 14]
    assert step_ends("one\n") == [4] and step_ends("") == [0] and step_ends("x") == [1]
    assert step_ends("123", CHARACTER) == [1, 2, 3]


def test_implicit_rewards_are_log_ratios_of_tokens(tiny_lm: str, other_lm: str) -> None:
    made = ImplicitPRM(tiny_lm, other_lm, beta=0.1)(["42", "", "9"], ["17+25=", "1+1=", "4+4="], [{}] * 3)
    models = CausalModel.load(tiny_lm, "cpu"), CausalModel.load(other_lm, "cpu")
    assert made.steps is not None
    for row, (prompt, text) in enumerate([("17+25=", "42"), ("1+1=", ""), ("4+4=", "9")]):
        own, reference = (one_by_one(model, prompt, text) for model in models)
        expected = [0.1 * (math.log(a) - math.log(b)) for a, b in zip(own, reference, strict=True)]
        assert [end for end, _ in made.steps[row]] == list(range(1, len(text) + 1))
        assert [value for _, value in made.steps[row]] == pytest.approx(expected, abs=1e-5)
        assert made.value[row].item() == pytest.approx(sum(expected), abs=1e-5)


def test_turns_earn_what_they_add_to_the_right_answers_probability(model: CausalModel) -> None:
    reward = InformationGain(ExactMatch(), separator=CHARACTER, lead="=")
    reward.bind(model)
    texts, prompts, records = ["42", "9"], ["17+25=", "4+4="], [{"answer": "42"}, {"answer": "8"}]
    made = score(reward, texts, prompts, records)  # type: ignore[arg-type]
    assert made.steps is not None

    def likelihood(prompt: str, text: str, answer: str) -> float:
        own = one_by_one(model, f"{prompt}{text}=", answer)
        return math.prod(own) ** (1 / len(own))

    gain = likelihood("17+25=", "4", "42") - likelihood("17+25=", "", "42")
    assert made.steps[0] == [(1, pytest.approx(gain, abs=1e-5)), (2, 1.0)]
    assert made.steps[1] == [(1, 0.0)]
    assert made.parts["exact_match"].tolist() == [1, 0]


def test_steps_are_as_faithful_as_they_make_the_right_rest_probable(model: CausalModel) -> None:
    reward = PathFaithfulness(separator=CHARACTER)
    reward.bind(model)
    made = reward(["12", "425"], ["17+25=", "17+25="], [{"reasoning": "42"}] * 2)
    assert made.steps is not None
    for row, text in enumerate(["12", "425"]):
        expected = []
        for k in range(len(text)):
            own = one_by_one(model, "17+25=" + text[: k + 1], "42"[min(k + 1, 1) :])
            expected.append(math.prod(own) ** (1 / len(own)) / len(text))
        assert [value for _, value in made.steps[row]] == pytest.approx(expected, abs=1e-5)


def test_bounds_and_gates_change_steps_and_keep_their_places() -> None:
    texts, prompts = ["abcd", "abxxxx", "ab"], ["p"] * 3
    steps = Steps([[0.5, 0.9], [0.2, 0.8, 0.4], [0.7]])
    clipped = score(ClipBound(steps, 0.6), texts, prompts, [{}] * 3)  # type: ignore[arg-type]
    assert clipped.steps is not None
    assert [[end for end, _ in row] for row in clipped.steps] == [[2, 4], [2, 4, 6], [2]]
    assert clipped.value.tolist() == pytest.approx([-0.1, -0.6, 0])
    delta = score(DeltaBound(steps), texts, prompts, [{}] * 3)  # type: ignore[arg-type]
    assert delta.value.tolist() == pytest.approx([0.5, 0.2, 0.7])
    assert delta.steps is not None and [v for _, v in delta.steps[1]] == pytest.approx([-0.6, 0.4, 0.4])
    gated = score(Gated(steps, as_reward(right)), texts, prompts, [{}] * 3)  # type: ignore[arg-type]
    assert gated.value.tolist() == pytest.approx([1.4, 0, 0])


def test_a_reward_without_steps_has_one() -> None:
    made = score(ClipBound(as_reward(right), 0.25), ["abcd", "x"], ["p"] * 2, [{}] * 2)  # type: ignore[arg-type]
    assert made.steps == [[(4, 0.0)], [(1, -0.25)]]


def test_a_sum_adds_outcomes_at_the_end_and_weighs_steps() -> None:
    texts = ["abcd", "abxx"]
    summed = WeightedSum([as_reward(right), Steps([[0.5, 0.5], [0.25, 1.0]])], [2.0, 0.5])
    made = score(summed, texts, ["p"] * 2, [{}] * 2)  # type: ignore[arg-type]
    assert made.steps == [[(2, 0.25), (4, 0.25), (END, 2.0)], [(2, 0.125), (4, 0.5), (END, 0.0)]]
    assert made.value.tolist() == [sum(value for _, value in row) for row in made.steps]


def test_thoughts_count_as_far_as_they_tell_right_from_wrong_and_ever_less() -> None:
    def thought(texts: list[str], prompts: list[str]) -> list[float]:
        return [{"abcd": 0.4, "bad": 0.9, "good": 0.8}.get(text, 0.1) for text in texts]

    reward = TrustWeighted(as_reward(right), as_reward(thought), weight=0.3, decay=0.5)
    texts = ["abcd", "bad", "abcd", "wrong", "abcd", "abcd"]
    records = [{"group": number} for number in (0, 0, 1, 1, 2, 2)]
    made = score(reward, texts, ["p"] * 6, records).value.tolist()  # type: ignore[arg-type]
    trust = math.exp(0.4 - 0.9)
    # the last group is all right: its thoughts do not count
    assert made == pytest.approx([1 + 0.3 * trust * 0.4, 0.3 * trust * 0.9, 1.12, 0.03, 1, 1])
    reward.advance(0.5)
    late = score(reward, texts, ["p"] * 6, records).value.tolist()  # type: ignore[arg-type]
    assert late[3] == pytest.approx(0.03 / math.e) and reward.spec.scheduled
