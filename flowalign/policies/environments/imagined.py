"""A language model in the place of an environment: it says what would happen, reminded of what happened before."""

import functools
import json
import re
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flowalign.errors import ConfigError
from flowalign.policies.environments.base import Answer
from rewards.judges.base import Judge, Question
from rewards.judges.local import Local
from rewards.judges.served import Served

TEMPLATE = """You stand for the environment of an agent. Its task:
{task}

What happened before in like cases:
{examples}

The episode so far:
{episode}

The agent now does:
{action}

Say what happens, in three lines:
observation: what the agent sees next
reward: a number from 0 to 1 for how far the task is done
done: yes or no"""
PATTERN = r"(?s)observation:\s*(?P<observation>.*?)\s*reward:\s*(?P<reward>[\d.]+)\s*done:\s*(?P<done>yes|no)"


class Experience(NamedTuple):
    """A step of an episode, recorded or imagined."""

    task: str
    action: str
    observation: str
    reward: float


class Imagined:
    """An experience model as the environment (after the abstract of DreamGym, arXiv 2511.03773).

    The model is asked what an action leads to, and is shown the recorded steps that share most words with the task and
    the action. Recorded steps come from a file; with `enrich` imagined ones join them, newest last, as long as the
    process runs: they are in no checkpoint, so that a resumed run imagines anew. The selection `evolving` with `source:
    middling` makes the new tasks. An answer that cannot be read ends the episode with reward 0.

    Args:
        model: where the model is, local or served.
        file: JSON lines with `task`, `action`, `observation` and `reward`; null: none.
        shown: number of recorded steps that the model is shown.
        enrich: imagined steps are recorded too.
        buffer: largest number of recorded steps.
        template: what the model is asked; {task}, {examples}, {episode} and {action} are filled in.
        pattern: a regular expression with groups named observation, reward and done ('yes' ends the episode).
        most: largest number of tokens of a reply.
    """

    name = "imagined"

    def __init__(
        self,
        model: Local | Served,
        file: str | None = None,
        shown: int = 2,
        enrich: bool = False,
        buffer: int = 4096,
        template: str = TEMPLATE,
        pattern: str = PATTERN,
        most: int = 256,
    ) -> None:
        self.pattern = re.compile(pattern)
        if {"observation", "reward", "done"} - self.pattern.groupindex.keys() or "{action}" not in template:
            raise ConfigError("environment.imagined: template has {action}, and pattern observation, reward and done")
        self.judge: Judge = model.build(self.name)
        self.recorded = recorded(file, buffer)
        self.shown, self.enrich, self.template, self.most = shown, enrich, template, most

    def reset(self, prompt: str, metadata: Mapping[str, Any]) -> str:
        self.task, self.episode = prompt, ""
        return prompt

    def step(self, completion: str) -> Answer:
        known = nearest_steps(self.recorded, self.task, completion, self.shown)
        examples = "\n".join(f"{each.action} -> {each.observation} (reward {each.reward:g})" for each in known)
        fields = {"task": self.task, "examples": examples, "episode": self.episode, "action": completion}
        asked = re.sub(r"\{(task|examples|episode|action)\}", lambda field: fields[field[1]], self.template)
        (reply,) = self.judge.reply([Question((), asked)], 0.0, self.most, 0)
        found = self.pattern.search(reply)
        if found is None:
            return Answer("", done=True)
        reward = min(max(_number(found["reward"]), 0.0), 1.0)
        observation = found["observation"]
        self.episode += f"{completion} -> {observation}\n"
        if self.enrich:
            self.recorded.append(Experience(self.task, completion, observation, reward))
        return Answer(observation, reward=reward, done=found["done"] == "yes")


@functools.cache
def recorded(file: str | None, buffer: int) -> deque[Experience]:
    """Recorded steps, which the episodes of this process share.

    Raises:
        ConfigError: a line lacks a field.
    """
    steps: deque[Experience] = deque(maxlen=buffer)
    lines = [] if file is None else Path(file).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            task, action, observation = (str(record[key]) for key in ("task", "action", "observation"))
            steps.append(Experience(task, action, observation, float(record["reward"])))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"environment.file: {file}, line {number}: a step has task, action, observation and reward ({error})"
            ) from error
    return steps


def nearest_steps(steps: deque[Experience], task: str, action: str, count: int) -> list[Experience]:
    """The recorded steps whose task and action share the largest part of their words with these, nearest last."""
    wanted = _words(task) | _words(action)

    def shared(step: Experience) -> float:
        own = _words(step.task) | _words(step.action)
        return len(own & wanted) / max(1, len(own | wanted))

    return sorted(steps, key=shared)[-count:] if count else []


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
