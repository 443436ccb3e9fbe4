import json
import multiprocessing
import os
import random
import signal
import sqlite3
import time
from pathlib import Path

import pytest
from PIL import Image
from scipy.stats import binomtest

from flowalign.app.gallery.votes import agreement, results, wilson
from flowalign.data import Preferences
from flowalign.data.votes import VERDICTS, Pair, Votes
from flowalign.errors import ConfigError


def pair(folder, n: int) -> Pair:
    for side in ("a", "b"):
        Image.new("RGB", (8, 8)).save(folder / f"{side}{n}.png")
    return Pair(f"pair{n}", f"prompt {n} \u05e9 \n'", str(n), folder / f"a{n}.png", folder / f"b{n}.png")


@pytest.mark.parametrize("wins, trials", [(0, 1), (1, 1), (3, 10), (50, 100), (999, 1000)])
def test_wilson_is_scipys(wins, trials):
    interval = binomtest(wins, trials).proportion_ci(0.95, "wilson")
    assert wilson(wins, trials) == pytest.approx((interval.low, interval.high), abs=1e-12)


def test_wilson_without_trials():
    assert wilson(0, 0) == (0, 1)


def test_kappa_on_a_worked_example():
    # Cohen's table: 20 both yes, 15 both no, 5 and 10 apart: observed 0.7, by chance 0.5
    one = ["second"] * 25 + ["first"] * 25
    other = ["second"] * 20 + ["first"] * 5 + ["second"] * 10 + ["first"] * 15
    ((found,), _) = agreement({"a": dict(enumerate(one)), "b": dict(enumerate(other))})
    assert found["kappa"] == pytest.approx(0.4)
    ((found,), _) = agreement({"a": {0: "tie"}, "b": {0: "tie"}})
    assert found["kappa"] is None


def test_results_of_hundreds_of_raters_are_there_at_once():
    rng = random.Random(0)
    verdicts = {
        f"rater {i:03d}": {str(pair): rng.choice(VERDICTS) for pair in rng.sample(range(400), 200)} for i in range(300)
    }
    scores = {str(pair): ({"r": rng.random()}, {"r": rng.random()}) for pair in range(400)}
    begin = time.process_time()
    table = results(verdicts, scores)
    spent = time.process_time() - begin
    assert len(table["between"]) == 200 and table["more_between"] == 300 * 299 // 2 - 200
    assert table["between"][0]["pairs"] > 60 and len(json.dumps(table)) < 200_000
    begin, literal = time.process_time(), table["between"][::2]
    for found in literal:
        one, other = (verdicts[rater] for rater in found["raters"])
        both = [p for p in one if p in other and "skip" not in (one[p], other[p])]
        same = sum(one[p] == other[p] for p in both) / len(both)
        share = [[sum(votes[p] == v for p in both) / len(both) for v in VERDICTS] for votes in (one, other)]
        chance = sum(a * b for a, b in zip(*share))
        assert (found["pairs"], found["same"]) == (len(both), same)
        assert found["kappa"] == pytest.approx((same - chance) / (1 - chance))
    # this loop for all couples of raters takes some twenty times as long
    assert spent < 0.15 * (time.process_time() - begin) / len(literal) * 300 * 299 / 2


def test_results():
    verdicts = {
        "Ada": {"1": "second", "2": "second", "3": "first", "4": "tie", "5": "skip"},
        "Bob": {"1": "second", "2": "first", "5": "second"},
    }
    scores = {key: ({"r": 0.0, "s": 0.0}, {"r": 1.0, "s": 0.0}) for key in "12345"}
    table = results(verdicts, scores)
    # pair 1: 1, pair 2: 1/2, pair 3: 0, pair 4: 1/2, pair 5: 1
    assert table["all"]["rate"] == pytest.approx(3 / 5)
    assert (table["all"]["low"], table["all"]["high"]) == wilson(3, 5)
    assert [table["all"][k] for k in ("wins", "losses", "ties", "skipped")] == [4, 2, 1, 1]
    assert table["raters"][0]["rate"] == pytest.approx(2.5 / 4)
    (between,) = table["between"]
    assert {key: between[key] for key in ("raters", "pairs", "same", "kappa")} == {
        "raters": ["Ada", "Bob"], "pairs": 2, "same": 0.5, "kappa": 0.0,
    }  # fmt: skip
    # chance alone agrees in half of the pairs
    assert [between["low"], between["high"]] == pytest.approx([2 * end - 1 for end in wilson(1, 2)])
    # r prefers the second: right on 1 and 5, wrong on 3; 2 and 4 chose nothing, s tells nothing apart
    (reward,) = table["rewards"]
    assert reward["name"] == "r" and reward["rate"] == pytest.approx(2 / 3) and reward["pairs"] == 3


def test_results_of_no_votes():
    table = results({}, {"1": ({"r": 0.0}, {"r": 1.0})})
    assert table["all"]["rate"] is None and table["rewards"] == []


def test_undo_takes_back_the_raters_latest_within_the_pairs(tmp_path):
    votes = Votes(tmp_path / "votes.sqlite")
    for n in range(3):
        votes.add("Ada", pair(tmp_path, n), "first")
    votes.add("Bob", pair(tmp_path, 1), "second")
    votes.add("Ada", pair(tmp_path, 1), "second")
    assert votes.verdicts(["pair1"]) == {"Ada": {"pair1": "first"}, "Bob": {"pair1": "second"}}
    votes.undo("Ada", ["pair0", "pair1"])
    assert votes.verdicts(["pair0", "pair1", "pair2"])["Ada"] == {"pair0": "first", "pair2": "first"}
    votes.undo("nobody", ["pair0"])
    assert len(votes.preferences()) == 3


def test_export_is_read_back(tmp_path):
    votes = Votes(tmp_path / "votes.sqlite")
    for n, verdict in enumerate(("first", "second", "tie", "skip")):
        votes.add("Ada", pair(tmp_path, n), verdict)
    assert votes.export(tmp_path / "sets" / "p.jsonl") == 2
    preferences = Preferences.read(str(tmp_path / "sets" / "p.jsonl"))
    first, second = preferences.metadata
    assert preferences.texts[0] == "prompt 0 \u05e9 \n'" and first["rater"] == "Ada"
    assert [Path(first[key]).name for key in ("chosen", "rejected")] == ["a0.png", "b0.png"]
    assert [Path(second[key]).name for key in ("chosen", "rejected")] == ["b1.png", "a1.png"]
    # relative: data set and pictures move together
    (tmp_path / "moved").mkdir()
    for name in ("sets", "a0.png", "b0.png", "a1.png", "b1.png"):
        os.rename(tmp_path / name, tmp_path / "moved" / name)
    moved = Preferences.read(str(tmp_path / "moved" / "sets" / "p.jsonl")).metadata[0]["chosen"]
    assert Path(moved).is_file() and "moved" in moved


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"prompt": "p"}',
        '{"prompt": "p", "chosen": 1, "rejected": "b"}',
        '{"prompt": "p", "chosen": "no.png", "rejected": "no.png"}',
    ],
)
def test_bad_preferences_name_the_line(tmp_path, line):
    (tmp_path / "p.jsonl").write_text("\n" + line)
    with pytest.raises(ConfigError, match="line 2"):
        Preferences.read(str(tmp_path / "p.jsonl"))
    with pytest.raises(ConfigError, match="no preferences at"):
        Preferences.read(str(tmp_path / "none.jsonl"))


def keep_voting(path, folder, told) -> None:
    votes = Votes(path)
    for n in range(10_000):
        votes.add("Ada", Pair(f"pair{n}", "p", "0", folder / "a", folder / "b"), "first")
        os.write(told, b".")


def test_a_kill_loses_no_vote_that_was_acknowledged(tmp_path):
    """SIGKILL in the middle of voting: every vote that `add` returned from is there."""
    read, write = os.pipe()
    process = multiprocessing.get_context("fork").Process(
        target=keep_voting, args=(tmp_path / "v.sqlite", tmp_path, write)
    )
    process.start()
    os.close(write)
    seen = len(os.read(read, 1))
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    while block := os.read(read, 65536):
        seen += len(block)
    stored = len(Votes(tmp_path / "v.sqlite").verdicts(f"pair{n}" for n in range(10_000))["Ada"])
    assert stored - seen in (0, 1) and seen > 1
    with sqlite3.connect(tmp_path / "v.sqlite") as file:
        assert file.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_export_file_is_plain_json_lines(tmp_path):
    votes = Votes(tmp_path / "votes.sqlite")
    votes.add("Ada", pair(tmp_path, 0), "first")
    votes.export(tmp_path / "p.jsonl")
    (line,) = (tmp_path / "p.jsonl").read_text().splitlines()
    assert json.loads(line).keys() == {"prompt", "seed", "chosen", "rejected", "rater"}


def test_a_file_of_votes_on_pictures_takes_votes_on_texts_too(tmp_path):
    path = tmp_path / "votes.sqlite"
    with sqlite3.connect(path) as file:
        file.execute(
            "CREATE TABLE votes (number INTEGER PRIMARY KEY, rater TEXT NOT NULL, pair TEXT NOT NULL,"
            " prompt TEXT NOT NULL, seed TEXT NOT NULL, first TEXT NOT NULL, second TEXT NOT NULL,"
            " verdict TEXT NOT NULL, time REAL NOT NULL, UNIQUE (rater, pair))"
        )
        file.execute("INSERT INTO votes VALUES (1, 'Ada', 'k', 'p', '0', '/a.png', '/b.png', 'first', 0.0)")
    for _ in range(2):
        votes = Votes(path)
    votes.add("Ada", Pair("t", "1+1=", "7", "two", "2"), "second")
    assert votes.preferences() == [
        {"prompt": "p", "seed": "0", "chosen": "/a.png", "rejected": "/b.png", "rater": "Ada"},
        {"prompt": "1+1=", "seed": "7", "chosen": "2", "rejected": "two", "rater": "Ada", "medium": "text"},
    ]
    assert votes.export(tmp_path / "out" / "preferences.jsonl") == 2
    kept = (tmp_path / "out" / "preferences.jsonl").read_text().splitlines()
    assert '"chosen": "2"' in kept[1], "a text is no path"
