"""Judges of texts: the tiny VLM without pictures, and judges that follow a rule."""

from collections.abc import Sequence
from typing import Any

import pytest

from rewards import score
from rewards.judges.base import Question
from rewards.judges.local import Local
from rewards.judges.text import PairwiseTextJudge, TextJudge, ThoughtPRM
from rewards.preference import WinRate


class Rule:
    """Answers by looking at the question's text."""

    def choose(self, questions: Sequence[Question], labels: Sequence[str]) -> list[list[float] | None]:
        shown = [question.text.split("step: ")[1].split(". Is")[0] for question in questions]
        return [[1.0, 0.0] if "+" in step else [0.0, 1.0] for step in shown]

    def echo(self, questions: Sequence[Question], answers: Sequence[str]) -> list[float]:
        raise NotImplementedError

    def reply(self, questions: Sequence[Question], temperature: float, max_tokens: int, seed: int) -> list[str]:
        replies = []
        for question in questions:
            if "Answer A: " in question.text:
                first, second = (question.text.split(f"Answer {side}: ")[1].split("\n")[0] for side in "AB")
                replies.append(f"Winner: {'tie' if len(first) == len(second) else 'A' if first > second else 'B'}")
            else:
                answer = question.text.split("The answer was: ")[1].split("\n")[0]
                replies.append(f"Principle 1 of 10: brevity (weight 3). Score: {len(answer)}" if answer else "none")
        return replies


def judged(judge: Any) -> Any:
    """For a reward that is made with one."""
    return judge


def test_a_rubric_is_the_mean_of_the_judges_probabilities(tiny_vlm: str) -> None:
    local = Local(tiny_vlm)
    reward = TextJudge("text_rubric", local)
    texts, prompts = ["a red circle", "a blue square"], ["two shapes", "two shapes"]
    made = score(reward, texts, prompts, [{"criterion": "short"}, {}])  # type: ignore[arg-type]
    questions = [
        Question((), f"The task was: two shapes. The answer was: {text}. Is it {how}? Answer with yes or no.")
        for text, how in zip(texts, ("short", "correct"), strict=True)
    ]
    chances = local.build("x").choose(questions, ["yes", "no"])
    assert [chance[0] for chance in chances if chance] == pytest.approx(made.parts["criterion"].tolist(), abs=1e-5)
    expected = (made.parts["criterion"] + made.parts["task"]) / 2
    assert made.value.tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_principles_come_before_a_score_that_is_read_from_the_end() -> None:
    reward = TextJudge("text_principles", judged(Rule()))
    made = score(reward, ["1", "12345", "", "12345678"], ["p"] * 4, [{"group": 0}] * 4)  # type: ignore[arg-type]
    known = [0, 4 / 9, 7 / 9]
    assert made.value.tolist() == pytest.approx([*known[:2], sum(known) / 3, known[2]])
    assert made.parts["unparsed"].tolist() == [0, 0, 1, 0]


def test_texts_are_compared_and_ranked() -> None:
    reward = WinRate(PairwiseTextJudge("text_pair", judged(Rule())))
    made = score(reward, ["a", "bb", "ccc", "dd"], ["p"] * 4, [{}] * 4)  # type: ignore[arg-type]
    assert made.value.tolist() == pytest.approx([0, 1.5 / 3, 2 / 3, 2.5 / 3])


def test_runs_of_steps_of_one_verdict_are_thoughts() -> None:
    reward = ThoughtPRM(judged(Rule()))
    text = "1+1\n2+2\nno\nno\n3+3"
    made = score(reward, [text, "no"], ["p"] * 2, [{}] * 2)  # type: ignore[arg-type]
    assert made.steps is not None
    assert made.steps[0] == [
        (4, 0),
        (8, pytest.approx(1 / 3)),
        (11, 0),
        (14, pytest.approx(-1 / 3)),
        (17, pytest.approx(1 / 3)),
    ]
    assert made.value.tolist() == pytest.approx([1 / 3, -1])


def test_a_template_of_pictures_is_refused(tiny_vlm: str) -> None:
    with pytest.raises(ValueError, match="judges pictures"):
        TextJudge("rubric", Local(tiny_vlm))
