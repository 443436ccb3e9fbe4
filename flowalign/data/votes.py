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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowalign.errors import ConfigError

VERDICTS = ("first", "second", "tie", "skip")
WORTH = {"first": 0.0, "second": 1.0, "tie": 0.5}
"""Value of a verdict for the second picture."""
REPEAT = "~"
"""End of a pair's key where a rater judges it a second time, with its sides swapped."""
CATCH = "!"
"""End of a pair's key where the second sample is broken, so that the answer is known."""
FEW = 100
"""Choices below which training refuses, if it is not told otherwise; docs/gallery.md has the measurements."""


@dataclass(frozen=True)
class Pair:
    """Two pictures or texts of one prompt; of one seed, `first` comes from the earlier column of the gallery."""

    key: str
    prompt: str
    seed: str
    first: Path | str
    """A picture's file, or a text."""
    second: Path | str


JOURNAL = bytes.fromhex("d9d505f920a163d7")
"""Bytes that a journal of SQLite begins with, and ends with where it names another (sqlite.org/fileformat)."""
PLAIN = f"pair NOT LIKE '%{REPEAT}' AND pair NOT LIKE '%{CATCH}'"
TEXTS = ("rater", "pair", "prompt", "seed", "first", "second", "medium")
"""Columns that hold texts."""


class Votes:
    """A file of votes. Each is on the disk before `add` returns (WAL, synchronous), so a crash loses none.

    Args:
        path: path of the SQLite file, made where there is none.

    Raises:
        ConfigError: the file has other contents than votes, as somebody else's may.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if _names_another(Path(f"{path}-journal")):
            raise ConfigError(f"{path}-journal is no part of a gallery's votes; remove it")
        with closing(self._open()) as file, file:
            kinds = file.execute("SELECT DISTINCT type FROM sqlite_master").fetchall()
            # a view can be without end
            if not {kind for (kind,) in kinds} <= {"table", "index"}:
                raise ConfigError(f"{path} is no file of votes: it holds more than tables")
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
            odd = " OR ".join(f"typeof({column}) <> 'text'" for column in TEXTS)
            known = ", ".join(f"'{verdict}'" for verdict in VERDICTS)
            found = file.execute(f"SELECT number FROM votes WHERE {odd} OR verdict NOT IN ({known})").fetchone()
            if found is not None:
                raise ConfigError(f"{path} is no file of votes: number {found[0]} is no vote")

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
        wanted = _and_again(pairs)
        with closing(self._open()) as file, file:
            rows = file.execute("SELECT number, pair FROM votes WHERE rater = ? ORDER BY number DESC", (rater,))
            number = next((number for number, pair in rows if pair in wanted), None)
            file.execute("DELETE FROM votes WHERE number = ?", (number,))

    def verdicts(self, pairs: Iterable[str]) -> dict[str, dict[str, str]]:
        """{rater: {pair: verdict}} over pairs, oldest first; keys may end on `REPEAT` or `CATCH`."""
        wanted = _and_again(pairs)
        table: dict[str, dict[str, str]] = defaultdict(dict)
        with closing(self._open()) as file:
            for rater, pair, verdict in file.execute("SELECT rater, pair, verdict FROM votes ORDER BY number"):
                if pair in wanted:
                    table[rater][pair] = verdict
        return dict(table)

    def of_pictures(self) -> list[tuple[str, str, str, float]]:
        """Votes on two pictures, oldest first: the prompt, their files, the value of the second."""
        with closing(self._open()) as file:
            rows = file.execute(
                f"SELECT prompt, first, second, verdict, medium FROM votes WHERE {PLAIN} ORDER BY number"
            ).fetchall()
        chosen = [row for row in rows if row[4] == "picture" and row[3] in WORTH]
        return [(prompt, first, second, WORTH[verdict]) for prompt, first, second, verdict, _ in chosen]

    def caught(self) -> dict[str, tuple[int, int]]:
        """{rater: (right answers, pairs)} over all pairs with a broken sample; skipped ones do not count."""
        with closing(self._open()) as file:
            rows = file.execute(
                "SELECT rater, SUM(verdict = 'first'), COUNT(*) FROM votes WHERE pair LIKE ? AND verdict <> 'skip'"
                " GROUP BY rater ORDER BY rater",
                (f"%{CATCH}",),
            ).fetchall()
        return {rater: (right, pairs) for rater, right, pairs in rows}

    def preferences(self, beside: Path | None = None, within: Sequence[Path] | None = None) -> list[dict[str, str]]:
        """The choices as lines of the export.

        Args:
            beside: folder that pictures' paths are made relative to.
            within: folders of the runs that were shown, with all pictures of the votes in them.

        Raises:
            ConfigError: a picture is elsewhere.
        """
        with closing(self._open()) as file:
            rows = file.execute(
                "SELECT prompt, seed, first, second, verdict, rater, medium FROM votes"
                f" WHERE verdict IN ('first', 'second') AND {PLAIN} ORDER BY number"
            ).fetchall()
        lines = []
        for prompt, seed, first, second, verdict, rater, medium in rows:
            if within is not None and medium == "picture":
                self._check_within(within, first, second)
            if beside is not None and medium == "picture":
                first, second = os.path.relpath(first, beside), os.path.relpath(second, beside)
            chosen, rejected = (first, second) if verdict == "first" else (second, first)
            line = {"prompt": prompt, "seed": seed, "chosen": chosen, "rejected": rejected, "rater": rater}
            lines.append(line if medium == "picture" else {**line, "medium": medium})
        return lines

    def _check_within(self, folders: Sequence[Path], *pictures: str) -> None:
        for name in pictures:
            if "\0" in name or not any(Path(name).resolve().is_relative_to(folder.resolve()) for folder in folders):
                mend = "name every run that it shows"
                if not os.path.exists(name):
                    mend = "it is not there any more: votes keep full paths, so move the run back to where it was"
                raise ConfigError(f"{self.path}: the picture {name[:200]!r} is in none of the runs; {mend}")

    def export(self, path: Path, within: Sequence[Path] | None = None) -> int:
        """Write the preferences with paths relative to the file's folder; returns how many there are.

        Args:
            within: folders of the runs that were shown; see `preferences`.
        """
        lines = self.preferences(path.parent.resolve(), within)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json_lines(lines), encoding="utf-8")
        return len(lines)


def _and_again(pairs: Iterable[str]) -> set[str]:
    """The keys of pairs, of their repetitions, and of those with a broken sample."""
    return {pair + end for pair in pairs for end in ("", REPEAT, CATCH)}


def plain(key: str) -> bool:
    """Whether a pair's key is of a vote that teaches."""
    return not key.endswith((REPEAT, CATCH))


def plain_of(key: str) -> str:
    """The key of the pair that a repetition or one with a broken sample is of."""
    return key if plain(key) else key[:-1]


def _names_another(journal: Path) -> bool:
    """Whether a journal names another file, which SQLite would remove, wherever it is."""
    try:
        with open(journal, "rb") as file:
            file.seek(-len(JOURNAL), os.SEEK_END)
            return file.read() == JOURNAL
    except OSError:
        return False


def json_lines(records: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)
