"""Verifications that replies agree on, by a judge whose replies are written down."""

from collections.abc import Sequence
from typing import Any

from rewards import score
from rewards.judges.base import Question
from rewards.judges.reward import JudgeReward
from rewards.judges.verification import agreed, verdicts, verified


class Scripted:
    """Verifies the first solution in three ways, criticises the second of them, and cannot read the other solution."""

    def reply(self, questions: Sequence[Question], temperature: float, max_tokens: int, seed: int) -> list[str]:
        return [self._reply(question.text, seed) for question in questions]

    def _reply(self, text: str, seed: int) -> str:
        if "unreadable" in text:
            return "?"
        if "A verification of it" in text:
            return "<think>Step 2: 1</think>better\nStep 1: 1\nStep 2: 0" if "careless" in text else "no objection"
        return ["Step 1: 1\nStep 2: 0", "careless\nStep 1: 0\nStep 2: 1", "other\nStep 1: 1\nStep 2: 1"][seed % 3]


def judged(judge: Any) -> Any:
    """For a reward that is made with one."""
    return judge


def test_a_verification_is_kept_that_says_what_most_say_of_each_step() -> None:
    assert verdicts("Step 1: 1\nStep 2: 0\nStep 2: 1 \nStep 3: 2") == {1: 1}
    assert agreed(["Step 1: 1\nStep 2: 0", "Step 1: 1\nStep 2: 1", "Step 1: 0"]) == {1: 1}
    kept, nothing = verified(judged(Scripted()), ["add", "add"], ["1. a 2. b", "unreadable"], samples=3)
    assert nothing is None and kept is not None
    assert kept["completion"] == "Step 1: 1\nStep 2: 0" and kept["steps"] == [1, 0]
    assert kept["prompt"].startswith("The task was: add\nA solution:\n1. a 2. b\nCheck")
    # without critiques the three disagree on the second step by two to one
    plain, _ = verified(judged(Scripted()), ["add", "add"], ["1. a 2. b", "unreadable"], samples=3, critiques=0)
    assert plain is not None and plain["steps"] == [1, 1]


def test_the_share_of_right_steps_is_the_reward() -> None:
    reward = JudgeReward("text_verify", judged(Scripted()))
    assert score(reward, ["1. a 2. b"], ["add"], [{}]).value.tolist() == [0.5]
