"""Prompts that grow during a run: a language model writes new ones from those that the policy fails at."""

import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from flowalign.data import Prompts
from flowalign.data.batches import shuffled
from rewards.judges.base import Judge, Question
from rewards.judges.local import Local
from rewards.judges.served import Served

TEMPLATE = """Here is a task:
{prompt}

Write one new task of the same kind, a little different from it. Write the task alone."""


class Evolving:
    """New prompts from those of this run, after every few iterations; the list's own come in turn beside them.

    `source: failed` writes from prompts whose mean reward is at most `low`, as WebRL does (arXiv 2411.02337),
    `middling` from those between `low` and `high`, as DreamGym does (2511.03773), `solved` from those above. A new
    prompt that was drawn and got the same reward in its whole group is not drawn again. After the abstracts. New
    prompts have their source's metadata without `drop`, so that they want a reward that knows no right answer, or a
    writer that gives one.

    Args:
        writer: where the model that writes is, local or served.
        every: iterations between two times of writing.
        count: largest number of prompts that are written at a time.
        share: share of the groups that are of new prompts, once there are some.
        template: what the writer is asked; {prompt} is the prompt.
        pattern: a regular expression with a group named `prompt`; further named groups go into the metadata.
        most: largest number of tokens of a reply.
        temperature: of the writer; several processes should all get the same replies.
    """

    name = "evolving"

    def __init__(
        self,
        writer: Local | Served,
        source: Literal["failed", "middling", "solved"] = "failed",
        every: int = 1,
        count: int = 4,
        share: float = 0.5,
        low: float = 0.25,
        high: float = 0.75,
        template: str = TEMPLATE,
        pattern: str = r"(?s)\s*(?P<prompt>.+?)\s*$",
        drop: Sequence[str] = ("answer",),
        most: int = 256,
        temperature: float = 0.0,
    ) -> None:
        if "prompt" not in re.compile(pattern).groupindex or "{prompt}" not in template:
            raise ValueError("evolving: template has {prompt}, and pattern a group named prompt: (?P<prompt>...)")
        if not 0 < share < 1 or every < 1 or count < 1:
            raise ValueError("evolving: share in (0, 1), every and count at least 1")
        self.writer, self.source, self.every, self.count, self.share = writer, source, every, count, share
        self.low, self.high, self.template, self.pattern = low, high, template, re.compile(pattern)
        self.drop, self.most, self.temperature = frozenset(drop), most, temperature
        self._judge: Judge | None = None
        self.listed: int | None = None
        """Prompts of the list itself."""
        self.grown: list[tuple[str, dict[str, Any]]] = []
        self.dull: set[int] = set()
        """New prompts whose group got one and the same reward."""
        self.drawn = self.told = 0
        self.sources: list[int] = []

    def picks(self, prompts: Prompts, iteration: int, groups: int, seed: int, round: int = 0) -> list[int]:
        listed = self._joined(prompts)
        new = [i for i in range(listed, listed + len(self.grown)) if i not in self.dull]
        count = int(groups * self.share) if new else 0
        first, self.drawn = self.drawn, self.drawn + groups - count
        order = np.random.default_rng([seed, iteration, 7, round]).permutation(new)
        return shuffled(listed, first, groups - count, seed) + [int(order[i % len(order)]) for i in range(count)]

    def learn(self, picks: Sequence[int], prompts: Prompts, success: Sequence[float], gain: Sequence[float]) -> None:
        listed = self._joined(prompts)
        self.dull |= {pick for pick, size in zip(picks, gain, strict=True) if pick >= listed and size == 0}
        self.sources += [pick for pick, rate in zip(picks, success, strict=True) if self._wanted(rate)]
        self.told += 1
        if self.told % self.every == 0 and self.sources:
            self._write(prompts, list(dict.fromkeys(self.sources))[: self.count])
            self.sources = []

    def _wanted(self, rate: float) -> bool:
        kind = "failed" if rate <= self.low else "solved" if rate > self.high else "middling"
        return kind == self.source

    def _write(self, prompts: Prompts, sources: Sequence[int]) -> None:
        self._judge = self._judge or self.writer.build(self.name)
        questions = [Question((), self.template.replace("{prompt}", prompts.texts[pick])) for pick in sources]
        known = set(prompts.texts)
        replies = self._judge.reply(questions, self.temperature, self.most, self.told)
        for pick, reply in zip(sources, replies, strict=True):
            found = self.pattern.match(reply)
            text = "" if found is None else found["prompt"]
            if found is not None and text and text not in known:
                named = {key: value for key, value in found.groupdict().items() if key != "prompt" and value}
                record = {key: value for key, value in prompts.metadata[pick].items() if key not in self.drop}
                self.grown.append((text, record | named))
                known.add(text)
        self._joined(prompts)

    def _joined(self, prompts: Prompts) -> int:
        """The number of the list's own prompts, with all new ones behind them, as after a checkpoint."""
        self.listed = len(prompts) if self.listed is None else self.listed
        for text, record in self.grown[len(prompts) - self.listed :]:
            prompts.texts.append(text)
            prompts.metadata.append(record)
        return self.listed

    def state_dict(self) -> dict[str, Any]:
        return {
            "listed": self.listed,
            "grown": [[text, record] for text, record in self.grown],
            "dull": sorted(self.dull),
            "drawn": self.drawn,
            "told": self.told,
            "sources": self.sources,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.listed, self.dull, self.drawn = state["listed"], set(state["dull"]), state["drawn"]
        self.grown = [(text, dict(record)) for text, record in state["grown"]]
        self.told, self.sources = state["told"], list(state["sources"])
