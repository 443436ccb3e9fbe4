"""A judge's answers kept on the disk, so that the same question is asked once, in this run or another."""

import contextlib
import hashlib
import json
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rewards.judges.base import Judge, Question
from rewards.usage import Usage

WAIT = 60.0
"""Seconds to wait for another process that writes."""


class CachedJudge:
    """Asks a judge what the folder's file does not know yet.

    Args:
        model: the model's name; answers are another model's where it differs.
    """

    def __init__(self, judge: Judge, folder: str, model: str, usage: Usage) -> None:
        self.judge, self.model, self.usage = judge, model, usage
        self.file = Path(folder) / "answers.sqlite"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self._open() as base:
            base.execute("CREATE TABLE IF NOT EXISTS answers (question BLOB PRIMARY KEY, answer TEXT)")

    def choose(self, questions: Sequence[Question], labels: Sequence[str]) -> list[list[float] | None]:
        return self._answers(
            questions, ["choose", *labels], lambda rows: self.judge.choose(_of(questions, rows), labels)
        )

    def echo(self, questions: Sequence[Question], answers: Sequence[str]) -> list[float]:
        def ask(rows: list[int]) -> list[float]:
            return self.judge.echo(_of(questions, rows), [answers[i] for i in rows])

        return self._answers(questions, ["echo"], ask, answers)

    def reply(self, questions: Sequence[Question], temperature: float, max_tokens: int, seed: int) -> list[str]:
        # the most probable reply is the same for every seed
        how = ["reply", temperature, max_tokens, *([seed] if temperature > 0 else [])]

        def ask(rows: list[int]) -> list[str]:
            return self.judge.reply(_of(questions, rows), temperature, max_tokens, seed)

        return self._answers(questions, how, ask)

    def _answers(
        self,
        questions: Sequence[Question],
        how: list[Any],
        ask: Callable[[list[int]], Sequence[Any]],
        more: Sequence[str] | None = None,
    ) -> list[Any]:
        keys = [
            self._key(question, [*how, *([more[i]] if more is not None else [])])
            for i, question in enumerate(questions)
        ]
        with self._open() as base:
            stored = {
                key: base.execute("SELECT answer FROM answers WHERE question = ?", [key]).fetchone() for key in keys
            }
        known = {key: json.loads(row[0]) for key, row in stored.items() if row is not None}
        new: dict[bytes, int] = {}
        for i, key in enumerate(keys):
            if key not in known:
                new.setdefault(key, i)
        self.usage.add(cached=len(keys) - len(new))
        if new:
            answers = dict(zip(new, ask(list(new.values())), strict=True))
            with self._open() as base:
                base.executemany(
                    "INSERT OR REPLACE INTO answers VALUES (?, ?)",
                    [(key, json.dumps(answer)) for key, answer in answers.items()],
                )
            known |= answers
        return [known[key] for key in keys]

    def _key(self, question: Question, how: list[Any]) -> bytes:
        content = hashlib.sha256(json.dumps([self.model, how, question.system, question.text]).encode())
        for picture in question.pictures:
            content.update(f"{picture.mode}{picture.size}".encode())
            content.update(picture.tobytes())
        return content.digest()

    @contextlib.contextmanager
    def _open(self) -> Any:
        """A connection of this thread's own; what it wrote is there when it is left."""
        base = sqlite3.connect(self.file, timeout=WAIT)
        try:
            with base:
                yield base
        finally:
            base.close()


def _of(questions: Sequence[Question], rows: list[int]) -> list[Question]:
    return [questions[i] for i in rows]
