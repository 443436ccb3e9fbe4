"""Somebody's recorded episodes as an environment."""

import re
from collections.abc import Mapping
from typing import Any

from flowalign.errors import ConfigError
from flowalign.policies.environments.base import Answer


class Trace:
    """An expert's recorded actions: what agrees with the next one pays 1 and is answered as it was then.

    A turn that leaves the trace pays 0; it is answered by the expert's action and what followed it, so that the episode
    goes on along the trace, `patches` times, and is over after that (semi-online RL, UI-S1, arXiv 2509.11543). The
    policy keeps its own turns before it, right or wrong. Departure: the authors put the expert's action in the place of
    the wrong one, here it follows it.

    Args:
        key: key of the metadata with the trace, a list of {"action": ..., "observation": ...}.
        patches: turns that may leave the trace.
        pattern: a regular expression whose first group is the action in a turn; default the whole turn.
        correction: what a turn that left the trace is told, before the observation.
    """

    name = "trace"

    def __init__(
        self, key: str = "trace", patches: int = 1, pattern: str | None = None, correction: str = "{action}\n"
    ) -> None:
        if patches < 0:
            raise ValueError("trace: patches is 0 or more")
        self.key, self.patches, self.correction = key, patches, correction
        self.pattern = None if pattern is None else re.compile(pattern, re.DOTALL)

    def reset(self, prompt: str, metadata: Mapping[str, Any]) -> str:
        steps = metadata.get(self.key)
        if not isinstance(steps, list) or not steps or not all("action" in step for step in steps):
            raise ConfigError(
                f"environment 'trace' needs a list of actions under '{self.key}' in the metadata; the prompt "
                f"{prompt!r} has none"
            )
        self.steps, self.place, self.left = steps, 0, self.patches
        return prompt

    def step(self, completion: str) -> Answer:
        step = self.steps[self.place]
        right = self._action(completion) == str(step["action"]).strip()
        self.place, self.left = self.place + 1, self.left - (not right)
        done = self.place == len(self.steps) or self.left < 0
        told = "" if right else self.correction.replace("{action}", str(step["action"]))
        observation = told + str(step.get("observation", ""))
        return Answer(observation, reward=float(right), done=done, state=str(self.place))

    def _action(self, completion: str) -> str:
        if self.pattern is None:
            return completion.strip()
        found = self.pattern.search(completion)
        return "" if found is None else found[1].strip()
