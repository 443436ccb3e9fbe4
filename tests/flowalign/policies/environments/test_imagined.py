"""An experience model as the environment: what it is asked, by a real language model, and what is made of replies."""

import json
import re
from collections import deque
from pathlib import Path

import pytest

from flowalign.errors import ConfigError
from flowalign.policies.environments import Imagined
from flowalign.policies.environments.imagined import PATTERN, Experience, nearest_steps, recorded
from rewards.judges.base import Question
from rewards.judges.local import Local

STEPS = [
    Experience("find 4", "go north", "a wall", 0.0),
    Experience("find 4", "take the key", "a key", 0.5),
    Experience("sell 9", "wait", "nothing", 0.0),
]


def test_the_nearest_steps_share_most_words() -> None:
    known = nearest_steps(deque(STEPS), "find 7", "take the lamp", 2)
    # 3 of 6 words, and 1 of 6
    assert [each.action for each in known] == ["go north", "take the key"]
    assert nearest_steps(deque(STEPS), "find 7", "take", 0) == []


def test_the_model_answers_and_is_reminded(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_text(json.dumps({"task": "1+1=", "action": "2", "observation": "3", "reward": 1}) + "\n")
    settings = {"file": str(file), "shown": 1, "enrich": True, "template": "{episode}{action}+1=", "most": 3}
    made = Imagined(Local(model="tiny_lm"), pattern=r"(?P<reward>.)(?P<observation>.*)(?P<done>)", **settings)
    assert made.reset("1+1=", {}) == "1+1="
    judge = Local(model="tiny_lm").build("test")
    (first,) = judge.reply([Question((), "24+1=")], 0.0, 3, 0)
    answer = made.step("24")
    expected = min(int(first[0]), 1) if first[0].isdigit() else 0
    assert (answer.observation, answer.reward, answer.done) == (first[1:], expected, False)
    # the next question has the episode, and other episodes of the process know the step
    (second,) = judge.reply([Question((), f"24 -> {answer.observation}\n3+1=")], 0.0, 3, 0)
    assert made.step("3").observation == second[1:]
    assert [each.action for each in recorded(str(file), 4096)] == ["2", "24", "3"]


def test_replies_in_three_lines_are_read() -> None:
    found = re.search(PATTERN, "observation: you see\na door\nreward: 0.5\ndone: no")
    assert found is not None and found.groupdict() == {"observation": "you see\na door", "reward": "0.5", "done": "no"}
    with pytest.raises(ConfigError, match="pattern observation, reward and done"):
        Imagined(Local(model="tiny_lm"), pattern="(?P<observation>.*)")


def test_steps_that_lack_something_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"task": "t", "action": "a", "observation": "o"}\n')
    with pytest.raises(ConfigError, match="line 1: a step has task, action"):
        Imagined(Local(model="tiny_lm"), file=str(file))
