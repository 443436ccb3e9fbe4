"""Criteria of each prompt's own, and a rubric that a meta model rewrites, by judges that follow a rule."""

import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flowalign.errors import ConfigError
from rewards import RewardError, score
from rewards.judges.base import Question
from rewards.judges.criteria import WeightedCriteria, read_criteria, written_criteria
from rewards.judges.evolving import EvolvingJudge, read_rubric
from rewards.judges.reward import JudgeReward

SCRIPT = Path(__file__).parents[3] / "scripts" / "write_criteria.py"
SPEC = importlib.util.spec_from_file_location("write_criteria", SCRIPT)
assert SPEC is not None and SPEC.loader is not None
script = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(script)


class Rule:
    """Says yes where the answer has the criterion's last word, and writes what all of a committee name and the student
    does not."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def choose(self, questions: Sequence[Question], labels: Sequence[str]) -> list[list[float] | None]:
        chances: list[list[float] | None] = []
        for question in questions:
            found = re.search(r"The answer was: (.*?)\. Is the answer one that (.*?)\? ", question.text)
            assert found is not None
            good = 0.9 if found[2].split()[-1] in found[1] else 0.2
            chances.append([good, 1 - good])
        return chances

    def reply(self, questions: Sequence[Question], temperature: float, max_tokens: int, seed: int) -> list[str]:
        self.asked += [question.text for question in questions]
        return [self._reply(question.text) for question in questions]

    def _reply(self, text: str) -> str:
        if "rewritten the rubric" in text:
            return f"<rubric>merged {'both' if text.count('names the') == 3 else 'one'}</rubric>"
        if "judge rewards each answer" in text:
            return "the judge is fooled <rubric>names the cat</rubric>" if "Answer: dog" in text else "I cannot"
        committee, student = text.split("\n\n")[1:3]
        lines = [line.split(". ")[1].split() for line in committee.split("\n")[1:]]
        shared = set(lines[0]).intersection(*lines[1:]) - set(student.split())
        return "\n".join(json.dumps({"criterion": f"names the {word}", "weight": 2}) for word in sorted(shared))


def judged(judge: Any) -> Any:
    """For a reward that is made with one."""
    return judge


def test_criteria_count_by_their_weights() -> None:
    reward = WeightedCriteria(JudgeReward("text_criterion", judged(Rule())))
    criteria = [{"criterion": "names the cat", "weight": 3}, "names the hat"]
    records = [{"criteria": criteria}, {"criteria": criteria[:1]}]
    made = score(reward, ["a cat", "a hat"], ["describe it"] * 2, records)
    assert made.value.tolist() == pytest.approx([(3 * 0.9 + 0.2) / 4, 0.2])
    assert made.parts["met"].tolist() == [1, 0] and made.parts["criteria"].tolist() == [2, 1]
    for wrong in ({}, {"criteria": []}, {"criteria": [{"criterion": "x", "weight": -1}]}, {"criteria": [3]}):
        with pytest.raises(RewardError, match="no list of criteria under 'criteria'"):
            score(reward, ["a cat"], ["describe it"], [wrong])


def test_criteria_are_what_a_committee_agrees_on_and_the_student_lacks(tmp_path: Path) -> None:
    committee, student = ["red cat hat", "cat sits hat"], "a hat"
    (written,) = written_criteria(judged(Rule()), ["describe it"], [committee], [student])
    assert written == [{"criterion": "names the cat", "weight": 2.0}]
    file, output = tmp_path / "answers.jsonl", tmp_path / "criteria.jsonl"
    lines = [
        {"prompt": "describe it", "committee": committee, "student": student, "level": 1},
        {"prompt": "again", "committee": ["cat"], "student": "cat"},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert script.write(script.read(file), Rule(), output) == 1
    (made,) = map(json.loads, output.read_text().splitlines())
    assert made == {"prompt": "describe it", "level": 1, "criteria": written}
    file.write_text('{"prompt": "describe it", "committee": "cat", "student": "a"}\n')
    with pytest.raises(ConfigError, match="line 1: needs texts 'prompt' and 'student', and 'committee', a list"):
        script.read(file)


def test_criteria_are_read_one_a_line_and_reasoning_is_not() -> None:
    reply = (
        '<think>{"criterion": "no"}</think>Here:\n{"criterion": "is short"}\n{"criterion": 3}\n{bad}\n- {"weight": 1}'
    )
    assert read_criteria(reply) == [{"criterion": "is short", "weight": 1.0}]


def test_a_meta_model_rewrites_the_rubric_every_few_iterations() -> None:
    rule = Rule()
    reward = EvolvingJudge(
        JudgeReward("text_criterion", judged(rule)), judged(rule), "names a dog", every=2, reviews=2, shown=1
    )
    texts, prompts, records = ["dog", "dog", "dog"], ["describe"] * 3, [{}] * 3
    assert score(reward, texts, prompts, records).value.tolist() == pytest.approx([0.9] * 3)
    assert reward.learn(texts, prompts, records) == {"rewrites": 0, "rubric_words": 3} and not rule.asked
    assert reward.learn(texts, prompts, records)["rewrites"] == 1
    assert len(rule.asked) == 3 and "names a dog" in rule.asked[0]
    assert "Task: describe\nAnswer: dog\nReward: 0.90" in rule.asked[0]
    assert reward.rubric == "merged one"
    assert score(reward, texts, prompts, records).value.tolist() == pytest.approx([0.2] * 3)
    fresh = EvolvingJudge(JudgeReward("text_criterion", judged(rule)), judged(rule), every=2)
    fresh.load_state({}, json.loads(json.dumps(reward.state()[1])))
    assert (fresh.rubric, fresh.iterations, fresh.rewrites) == ("merged one", 2, 1)
    # a reply without a rubric changes nothing
    silent = EvolvingJudge(JudgeReward("text_criterion", judged(rule)), judged(rule), "names a cat", every=1)
    assert silent.learn(["cat"], ["describe"], [{}])["rewrites"] == 0 and silent.rubric == "names a cat"
    assert read_rubric("<think><rubric>no</rubric></think> none") is None
