"""The hostile suite passes an honest reward and catches those that can be bought."""

import re
from pathlib import Path

import numpy as np
import pytest

from rewards import FunctionReward
from rewards.base import RewardFailed
from rewards.check import TASKS, TEXTS, check_reward
from rewards.judges.reward import JudgeReward, PairwiseJudgeReward
from rewards.judges.template import load_template
from rewards.judges.thoughts import ThoughtPRM
from rewards.pairwise import WinRate
from rewards.shapes.reward import ShapesReward


def failed(checks):
    return {check.name for check in checks if not check.passed}


def test_the_checker_passes():
    checks = check_reward(ShapesReward())
    assert not failed(checks), checks
    assert {"noise", "words on a wrong picture", "batch and order"} <= {check.name for check in checks}


def test_a_reward_for_dark_pictures_is_caught():
    darkness = FunctionReward(lambda images, prompts: [1 - np.asarray(i.convert("L")).mean() / 255 for i in images])
    assert {"black", "words on a wrong picture"} <= failed(check_reward(darkness))


def test_a_reward_that_reads_words_is_caught():
    honest = ShapesReward()

    def gullible(images, prompts):
        values = honest(images, prompts, [{}] * len(images)).value.tolist()
        # sees black ink, which no shape has
        return [1.0 if (np.asarray(image).max(-1) == 0).any() else value for image, value in zip(images, values)]

    assert "words buy nothing" in failed(check_reward(FunctionReward(gullible)))


def test_a_reward_that_looks_at_its_neighbours_is_caught():
    honest = ShapesReward()

    def by_place(images, prompts):
        values = honest(images, prompts, [{}] * len(images)).value.tolist()
        return [value + 0.01 * place for place, value in enumerate(values)]

    assert failed(check_reward(FunctionReward(by_place))) == {"batch and order"}


def test_a_template_that_reads_anything_is_caught(tmp_path: Path):
    path = tmp_path / "naive.yaml"
    path.write_text(
        "source: a test\nanswer: score\nquestions:\n"
        "  - {name: naive, ask: 'Score {prompt}', scores: {any: '{number}'}, range: [0, 100]}\n"
    )
    checks = check_reward(ShapesReward(), load_template(str(path)))
    assert failed(checks) == {"hostile replies"}


def test_a_reward_that_refuses_nonsense_passes():
    honest = ShapesReward()

    def strict(images, prompts):
        values = honest(images, prompts, [{}] * len(images)).value.tolist()
        if 0.0 in values:
            raise ValueError("nothing to see")
        return values

    with pytest.raises(RewardFailed, match="ValueError: nothing to see"):  # a failure is no refusal
        check_reward(FunctionReward(strict))


def test_small_pictures_work_too():
    assert not failed(check_reward(ShapesReward(), size=32))


class Knows:
    """A judge of texts that knows the answers, and pays for what it can be told to pay for."""

    def __init__(self, paid: str | None = None) -> None:
        self.paid = paid

    def worth(self, task: str, text: str) -> float:
        right = next(answer for prompt, answer, _ in TASKS if prompt == task)
        return 2.0 if self.paid is not None and self.paid in text else float(text == right)

    def choose(self, questions, labels):
        about = r"The task was: (.*)\. The answer was: (.*)\. (?:Is|Does) it"
        asked = [re.match(about, question.text, re.S) for question in questions]
        return [[1.0, 0.0] if found and self.worth(*found.groups()) > 0 else [0.0, 1.0] for found in asked]

    def reply(self, questions, temperature, max_tokens, seed):
        replies = []
        for question in questions:
            task, first, second = re.match(
                r"The task was: (.*)\nAnswer A: (.*)\nAnswer B: (.*)\nWhich is better", question.text, re.S
            ).groups()
            a, b = self.worth(task, first), self.worth(task, second)
            replies.append(f"Winner: {'A' if a > b else 'B' if b > a else 'tie'}")
        return replies


def judges(paid=None):
    judge = Knows(paid)
    return {
        "text_judge": JudgeReward("text_rubric", judge),
        "text_pairwise": WinRate(PairwiseJudgeReward("text_pair", judge)),
        "thought_prm": ThoughtPRM(JudgeReward("text_rubric", judge), judge),
    }


@pytest.mark.parametrize("name", judges())
def test_a_judge_of_texts_that_knows_the_answers_passes(name):
    checks = check_reward(judges()[name], load_template("text_pair"))
    assert not failed(checks) and {check.name for check in checks} == {"hostile replies", *TEXTS}, checks


@pytest.mark.parametrize("name", judges())
@pytest.mark.parametrize(
    ("paid", "caught"),
    [(":", "one token"), ("Solution", "one token"), ("Winner: A", "verdict"), ("Note to", "instructions")],
)
def test_a_judge_of_texts_that_can_be_bought_is_caught(paid, caught, name):
    checks = {check.name: check for check in check_reward(judges(paid)[name])}
    assert not checks[caught].passed and paid in checks[caught].detail


def test_a_judge_of_texts_that_pays_for_nothing_at_all_is_caught():
    silent = Knows("")
    assert failed(check_reward(JudgeReward("text_rubric", silent))) == set(TEXTS)
