"""Blind votes: kept in SQLite, and exported as preferences that training reads.

A vote is on a pair of pictures, or of texts, of one prompt and seed, or of one prompt and two seeds. The export is JSON
lines of `{"prompt", "seed", "chosen", "rejected", "rater"}`; ties and skipped pairs choose nothing and are not in it.
`chosen` and `rejected` are files of pictures; of texts they are the texts, and the line says `"medium": "text"`.
"""

import json
import os
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERDICTS = ("first", "second", "tie", "skip")
WORTH = {"first": 0.0, "second": 1.0, "tie": 0.5}
"""Value of a verdict for the second picture."""


@dataclass(frozen=True)
class Pair:
    """Two pictures or texts of one prompt; of one seed, `first` comes from the earlier column of the gallery."""

    key: str
    prompt: str
    seed: str
    first: Path | str
    """A picture's file, or a text."""
    second: Path | str


class Votes:
    """A file of votes. Each is on the disk before `add` returns (WAL, synchronous), so a crash loses none.

    Args:
        path: path of the SQLite file, made where there is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with closing(self._open()) as file, file:
            file.execute("PRAGMA journal_mode=WAL")
            file.execute(
                "CREATE TABLE IF NOT EXISTS votes (number INTEGER PRIMARY KEY, rater TEXT NOT NULL, pair TEXT NOT NULL,"
                " prompt TEXT NOT NULL, seed TEXT NOT NULL, first TEXT NOT NULL, second TEXT NOT NULL,"
                " verdict TEXT NOT NULL CHECK (verdict IN ('first', 'second', 'tie', 'skip')), time REAL NOT NULL,"
                " UNIQUE (rater, pair))"
            )
            # files of votes were of pictures alone
            if "medium" not in [column[1] for column in file.execute("PRAGMA table_info(votes)")]:
                file.execute("ALTER TABLE votes ADD COLUMN medium TEXT NOT NULL DEFAULT 'picture'")

    def _open(self) -> sqlite3.Connection:
        file = sqlite3.connect(self.path, timeout=30)
        file.execute("PRAGMA synchronous=FULL")
        return file

    def add(self, rater: str, pair: Pair, verdict: str) -> None:
        """Keep a vote; a rater's second one on a pair, as from a repeated request, changes nothing."""
        medium = "picture" if isinstance(pair.first, Path) else "text"
        sides = str(pair.first), str(pair.second)
        row = (rater, pair.key, pair.prompt, pair.seed, *sides, verdict, time.time(), medium)
        with closing(self._open()) as file, file:
            file.execute(
                "INSERT OR IGNORE INTO votes (rater, pair, prompt, seed, first, second, verdict, time, medium)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                row,
            )

    def undo(self, rater: str, pairs: Iterable[str]) -> None:
        """Forget a rater's latest vote among pairs."""
        wanted = set(pairs)
        with closing(self._open()) as file, file:
            rows = file.execute("SELECT number, pair FROM votes WHERE rater = ? ORDER BY number DESC", (rater,))
            number = next((number for number, pair in rows if pair in wanted), None)
            file.execute("DELETE FROM votes WHERE number = ?", (number,))

    def verdicts(self, pairs: Iterable[str]) -> dict[str, dict[str, str]]:
        """{rater: {pair: verdict}} over pairs."""
        wanted = set(pairs)
        table: dict[str, dict[str, str]] = defaultdict(dict)
        with closing(self._open()) as file:
            for rater, pair, verdict in file.execute("SELECT rater, pair, verdict FROM votes ORDER BY number"):
                if pair in wanted:
                    table[rater][pair] = verdict
        return dict(table)

    def of_pictures(self) -> list[tuple[str, str, str, float]]:
        """Votes on two pictures, oldest first: the prompt, their files, the value of the second."""
        with closing(self._open()) as file:
            rows = file.execute("SELECT prompt, first, second, verdict, medium FROM votes ORDER BY number").fetchall()
        chosen = [row for row in rows if row[4] == "picture" and row[3] in WORTH]
        return [(prompt, first, second, WORTH[verdict]) for prompt, first, second, verdict, _ in chosen]

    def preferences(self, beside: Path | None = None) -> list[dict[str, str]]:
        """The choices as lines of the export; with `beside`, pictures' paths are relative to that folder."""
        with closing(self._open()) as file:
            rows = file.execute(
                "SELECT prompt, seed, first, second, verdict, rater, medium FROM votes"
                " WHERE verdict IN ('first', 'second') ORDER BY number"
            ).fetchall()
        lines = []
        for prompt, seed, first, second, verdict, rater, medium in rows:
            if beside is not None and medium == "picture":
                first, second = os.path.relpath(first, beside), os.path.relpath(second, beside)
            chosen, rejected = (first, second) if verdict == "first" else (second, first)
            line = {"prompt": prompt, "seed": seed, "chosen": chosen, "rejected": rejected, "rater": rater}
            lines.append(line if medium == "picture" else {**line, "medium": medium})
        return lines

    def export(self, path: Path) -> int:
        """Write the preferences with paths relative to the file's folder; returns how many there are."""
        lines = self.preferences(path.parent.resolve())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json_lines(lines), encoding="utf-8")
        return len(lines)


def json_lines(records: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)
