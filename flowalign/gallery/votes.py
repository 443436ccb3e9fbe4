"""Blind votes: kept in SQLite, summed up, and exported as preferences that training reads.

A vote is on a pair of pictures, or of texts, of one prompt and seed, or of one prompt and two seeds. The export is JSON
lines of `{"prompt", "seed", "chosen", "rejected", "rater"}`; ties and skipped pairs choose nothing and are not in it.
`chosen` and `rejected` are files of pictures; of texts they are the texts, and the line says `"medium": "text"`.
"""

import json
import math
import os
import shlex
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowalign.errors import ConfigError
from flowalign.runs.reading import read_yaml

DPO = "dpo.yaml"
"""beside pictures that `flowalign pairs` made: a configuration that trains on the votes on them"""
VERDICTS = ("first", "second", "tie", "skip")
WORTH = {"first": 0.0, "second": 1.0, "tie": 0.5}
"""of a verdict for the second picture"""


@dataclass(frozen=True)
class Pair:
    """Two pictures or texts of one prompt; of one seed, `first` comes from the earlier column of the gallery."""

    key: str
    prompt: str
    seed: str
    first: Path | str
    """a picture's file, or a text"""
    second: Path | str


class Votes:
    """A file of votes. Each is on the disk before `add` returns (WAL, synchronous), so a crash loses none.

    Args:
        path: of the SQLite file, made where there is none.
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
        """Of each vote on two pictures, oldest first: the prompt, their files, what the second was worth."""
        with closing(self._open()) as file:
            rows = file.execute("SELECT prompt, first, second, verdict, medium FROM votes ORDER BY number").fetchall()
        kept = [row for row in rows if row[4] == "picture" and row[3] in WORTH]
        return [(prompt, first, second, WORTH[verdict]) for prompt, first, second, verdict, _ in kept]

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


def enough(choices: int) -> str:
    """A word on how much so many choices can carry; docs/gallery.md has what it was measured on."""
    margin = f"a win rate is known to {98 / math.sqrt(choices):.0f} points, and " if choices else ""
    return (
        f"{choices} choices so far: {margin}training wants hundreds at least. On a tiny model 50 made it worse, 100 "
        "left it as it was, 2,000 helped. With few, train few passes and vote again on the new samples."
    )


def wilson(successes: float, trials: int) -> tuple[float, float]:
    """The 95% score interval of a proportion (Wilson 1927); (0, 1) without trials. Half successes are ties."""
    if trials == 0:
        return 0.0, 1.0
    z2 = 1.959963984540054**2
    share = successes / trials
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = math.sqrt(z2 * (share * (1 - share) / trials + z2 / (4 * trials**2))) / (1 + z2 / trials)
    return max(0.0, centre - half), min(1.0, centre + half)


def commands(runs: Sequence[Path], gallery: Path, texts: bool) -> list[str]:
    """The command lines that export a gallery's votes and train on them.

    Args:
        runs: the folders that it shows; one that `flowalign pairs` made has a configuration for its votes.
        gallery: the gallery's folder.
        texts: the votes are on texts.
    """
    votes = gallery / "votes.jsonl"
    lines: list[list[Path | str]] = [["gallery", *runs, "--output", gallery, "--export", votes]]
    if texts:
        lines += [["pair-questions", votes, "--template", "text_better", "--out", gallery / "questions.jsonl"]]
    else:
        lines += [["train", *_recipe(runs[0]), f"data.prompts={votes}"]]
        lines += [["train-reward", votes, "--out", gallery / "reward"]]
    return [shlex.join(["flowalign", *map(str, words)]) for words in lines]


def _recipe(run: Path) -> list[Path | str]:
    """The configuration that trains a run's model by DPO, and what to set in it."""
    if (run / DPO).is_file():
        return [run / DPO]
    try:
        model = read_yaml(run / "config.yaml")["model"]["path"]
    except (ConfigError, KeyError, TypeError):
        return ["sd3/dpo"]
    return ["tiny_sd3/dpo"] if model == "tiny_sd3" else ["sd3/dpo", f"model.path={model}"]


BETWEEN = 200
"""pairs of raters in the results, those who judged most in common"""


def agreement(verdicts: Mapping[str, Mapping[str, str]]) -> list[dict[str, Any]]:
    """Every two raters' agreement on what both judged: its share, and Cohen's kappa.

    Kappa is None where chance alone would always agree.
    """
    raters = sorted(verdicts)
    pairs = {pair: i for i, pair in enumerate(sorted({pair for votes in verdicts.values() for pair in votes}))}
    given = np.zeros((len(WORTH), len(raters), len(pairs)))
    kinds = {verdict: i for i, verdict in enumerate(WORTH)}
    for row, rater in enumerate(raters):
        for pair, verdict in verdicts[rater].items():
            if verdict in kinds:
                given[kinds[verdict], row, pairs[pair]] = 1
    judged = given.sum(0)
    # [raters, raters]
    both = judged @ judged.T
    same = (given @ given.transpose(0, 2, 1)).sum(0)
    # how often the row's rater gave each verdict among the pairs that the column's judged too
    often = given @ judged.T
    chance = (often * often.transpose(0, 2, 1)).sum(0)
    found = []
    for a, b in zip(*np.triu_indices(len(raters), 1)):
        if count := int(both[a, b]):
            share, luck = float(same[a, b]) / count, float(chance[a, b]) / count**2
            kappa = None if luck == 1 else (share - luck) / (1 - luck)
            found.append({"raters": [raters[a], raters[b]], "pairs": count, "same": share, "kappa": kappa})
    return found


def results(
    verdicts: Mapping[str, Mapping[str, str]], scores: Mapping[str, tuple[Mapping[str, float], Mapping[str, float]]]
) -> dict[str, Any]:
    """Win rates of the second pictures, agreement between raters, and agreement of the choices with each reward.

    Where several raters judged a pair it counts once, with their mean verdict, so that the interval is not made
    narrower by repetition.

    Args:
        verdicts: {rater: {pair: verdict}}.
        scores: {pair: (scores of the first picture, scores of the second)}.
    """
    judged: dict[str, list[float]] = defaultdict(list)
    for votes in verdicts.values():
        for pair, verdict in votes.items():
            if verdict != "skip":
                judged[pair].append(WORTH[verdict])
    means = {pair: sum(worth) / len(worth) for pair, worth in judged.items()}
    everything = [verdict for votes in verdicts.values() for verdict in votes.values()]
    raters = []
    for rater, votes in sorted(verdicts.items()):
        own = [WORTH[v] for v in votes.values() if v != "skip"]
        raters.append({"rater": rater, **_rate(sum(own), len(own)), **_counts(list(votes.values()))})
    between = agreement(verdicts)
    shown = sorted(sorted(range(len(between)), key=lambda i: -between[i]["pairs"])[:BETWEEN])
    names = sorted({name for first, second in scores.values() for name in first.keys() & second.keys()})
    rewards = []
    for name in names:
        agrees = [
            (mean > 0.5) == (second[name] > first[name])
            for pair, mean in means.items()
            for first, second in [scores[pair]]
            if mean != 0.5 and name in first and name in second and first[name] != second[name]
        ]
        if agrees:
            rewards.append({"name": name, **_rate(sum(agrees), len(agrees)), "pairs": len(agrees)})
    return {
        "all": {**_rate(sum(means.values()), len(means)), **_counts(everything)},
        "raters": raters,
        "between": [between[i] for i in shown],
        "more_between": len(between) - len(shown),
        "rewards": rewards,
    }


def _rate(successes: float, trials: int) -> dict[str, float | None]:
    low, high = wilson(successes, trials)
    return {"rate": successes / trials if trials else None, "low": low, "high": high}


def _counts(verdicts: list[str]) -> dict[str, int]:
    names = {"wins": "second", "losses": "first", "ties": "tie", "skipped": "skip"}
    return {name: verdicts.count(verdict) for name, verdict in names.items()}
