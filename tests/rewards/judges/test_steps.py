"""Judges of steps and turns, by a judge that follows a rule."""

import re
from collections.abc import Sequence
from typing import Any

import pytest

from rewards import score
from rewards.judges.base import Question
from rewards.judges.local import Local
from rewards.judges.steps import Renormed, StepJudge, Subgoals, parts_of
from rewards.text.turns import Transcript, Turn
from rewards.text.verifiers import ExactMatch


class Rule:
    """Likes steps by their first number, and says that a subgoal is reached where its word stands in the step."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def choose(self, questions: Sequence[Question], labels: Sequence[str]) -> list[list[float] | None]:
        self.asked += [question.text for question in questions]
        return [self._chance(question.text) for question in questions]

    def _chance(self, text: str) -> list[float]:
        step = re.search(r"(?:next step: |says: )(.*?)(?:\n|\. Does|$)", text)[1]
        if "subgoal" in text:
            good = float(re.search("subgoal of it: (.*)", text)[1] in step)
        else:
            good = int(re.search(r"\d+", step)[0]) / (100 if "rapport" in text or "relationship" in text else 10)
        return [good, 1 - good]

    def reply(self, questions: Sequence[Question], temperature: float, max_tokens: int, seed: int) -> list[str]:
        self.asked += [question.text for question in questions]
        return ["<think>1. no</think>Goals:\n1. key\n2) door \n" if "escape" in q.text else "?" for q in questions]


def judged(judge: Any) -> Any:
    """For a reward that is made with one."""
    return judge


def test_a_texts_value_is_the_mean_of_its_steps_verdicts() -> None:
    rule = Rule()
    reward = StepJudge("text_step", judged(rule))
    made = score(reward, ["step 8\nstep 4\n", "3"], ["task"] * 2, [{}] * 2)
    assert made.value.tolist() == pytest.approx([0.6, 0.3])
    assert [end for row in made.steps for end, _ in row] == [7, 14, 1]
    assert [value for row in made.steps for _, value in row] == pytest.approx([0.4, 0.2, 0.3])
    assert "The task was: task\nSo far: step 8\nThe next step: step 4\n" in rule.asked[1]


def test_questions_have_weights_and_templates_are_an_ensemble() -> None:
    reward = StepJudge("text_utterance", judged(Rule()), weights={"goal": 3.0, "rapport": 1.0})
    (made,) = score(reward, ["8"], ["task"], [{}]).value.tolist()
    assert made == pytest.approx((3 * 0.8 + 0.08) / 4)
    both = StepJudge(["text_step", "text_step_reference"], judged(Rule()))
    assert score(both, ["8"], ["task"], [{"answer": "1"}]).value.tolist() == pytest.approx([0.8])
    with pytest.raises(ValueError, match="no question is called 'charm'"):
        StepJudge("text_utterance", judged(Rule()), weights={"charm": 1.0})
    with pytest.raises(ValueError, match="with the field step"):
        StepJudge("text_rubric", judged(Rule()))


def test_good_steps_cannot_outweigh_the_result() -> None:
    reward = Renormed(StepJudge("text_step", judged(Rule())), ExactMatch(pattern=r"(\d+)"))
    made = score(reward, ["9\n9", "1\n2"], ["task"] * 2, [{"answer": "2"}] * 2)
    assert made.value.tolist() == pytest.approx([-0.1, 0.15])
    assert [value for row in made.steps for _, value in row] == pytest.approx([-0.05, -0.05, 0.05, 0.1])


def test_a_subgoal_pays_at_the_first_step_that_reaches_it() -> None:
    rule = Rule()
    reward = Subgoals(judged(rule))
    made = score(reward, ["take key\nkey again\nopen door", "door", "none"], ["escape"] * 3, [{}] * 3)
    assert made.value.tolist() == [1, 0.5, 0]
    assert made.steps[0] == [(9, 0.5), (19, 0), (28, 0.5)] and made.parts["subgoals"].tolist() == [2, 2, 2]
    asked = len(rule.asked)
    score(reward, ["key"], ["escape"], [{}])
    # the task is not split again
    assert len(rule.asked) == asked + 2
    assert score(reward, ["walk"], ["walk"], [{}]).value.tolist() == [1]


def test_turns_are_judged_without_the_environments_answers(tiny_vlm: str) -> None:
    turns = [
        Turn(begin=0, end=2, context=1, reward=0.0, state=""),
        Turn(begin=5, end=7, context=4, reward=1.0, state=""),
    ]
    text = Transcript("8!ans4!", turns, [])
    assert parts_of(text, "\n") == ([2, 7], [{"step": "8!", "before": ""}, {"step": "4!", "before": "8!ans"}])
    made = score(StepJudge("text_step", Local(tiny_vlm)), ["one\ntwo", "three"], ["task"] * 2, [{}] * 2)
    assert ((made.value > 0) & (made.value < 1)).all() and [len(row) for row in made.steps] == [2, 1]
