"""Which pairs a rater is shown: those that the votes leave open, and now and then one again."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flowalign.app.gallery.build import lay_out
from flowalign.app.gallery.server import EVERY, Polls
from flowalign.data.votes import REPEAT


@pytest.fixture
def polls(tmp_path: Path) -> Polls:
    """Four samples of twelve prompts, with a score that taste follows."""
    folder, rng = tmp_path / "run/samples/iteration-000000", np.random.default_rng(0)
    folder.mkdir(parents=True)
    with open(folder / "samples.jsonl", "w") as lines:
        for n in range(48):
            score = rng.normal()
            Image.new("RGB", (8, 8), (5 * n, 0, 0)).save(folder / f"{n}.png")
            line = {"picture": f"{n}.png", "prompt": f"prompt {n // 4}", "seed": str(n), "metadata": {}}
            lines.write(json.dumps(line | {"score": score, "noise": rng.normal()}) + "\n")
    run = tmp_path / "run"
    return Polls(lay_out([run], run / "gallery"), run / "gallery")


def better(polls: Polls, ballot: dict) -> str:
    """The side whose sample scores higher."""
    first, second = polls.contest(0, 0)[ballot["pair"].removesuffix(REPEAT)]
    shown = [
        polls.picture(0, 0, ballot["pair"], side, Path(ballot[side]["picture"]).stem) for side in ("left", "right")
    ]
    winner = max((first, second), key=lambda placed: placed.sample.scores["score"])
    return ("left", "right")[shown.index(winner.picture)]


def test_pairs_come_again_with_their_sides_swapped_and_are_not_counted_twice(polls: Polls) -> None:
    shown: dict[str, str] = {}
    for _ in range(EVERY * 2 + 2):
        ballot = polls.next("Ada", 0, 0)
        key, side = ballot["pair"], better(polls, ballot)
        if key.endswith(REPEAT):
            assert side != shown[key.removesuffix(REPEAT)]
        shown[key] = side
        polls.vote("Ada", 0, 0, key, side)
    again = [key for key in shown if key.endswith(REPEAT)]
    results = polls.results(0, 0)
    assert len(again) == 2 and len(polls.votes.preferences()) == EVERY * 2
    (row,) = results["raters"]
    assert row["wins"] + row["losses"] == EVERY * 2 and row["again"]["rate"] == 1 and row["again"]["pairs"] == 2
    # a rater who always says left contradicts themselves
    for _ in range(EVERY + 1):
        polls.vote("Bob", 0, 0, polls.next("Bob", 0, 0)["pair"], "left")
    assert polls.results(0, 0)["raters"][1]["again"]["rate"] == 0
    # undone one by one, the repetition first
    polls.votes.undo("Bob", polls.contest(0, 0))
    assert polls.results(0, 0)["raters"][1]["again"]["rate"] is None


def test_what_the_votes_have_settled_is_not_asked(polls: Polls) -> None:
    gaps = []
    for _ in range(40):
        ballot = polls.next("Ada", 0, 0)
        polls.vote("Ada", 0, 0, ballot["pair"], better(polls, ballot))
        first, second = polls.contest(0, 0)[ballot["pair"].removesuffix(REPEAT)]
        gaps.append(abs(first.sample.scores["score"] - second.sample.scores["score"]))
    # first the pairs that differ most; once the taste is known, those whose outcome is not yet sure
    assert np.mean(gaps[:5]) > np.mean(gaps[-10:])
    # three of the forty were repetitions
    assert polls.results(0, 0)["enough"].startswith("37 choices so far: too few yet to train on (63 more)")


def test_raters_share_some_pairs(polls: Polls) -> None:
    for rater in ("Ada", "Bob", "Cy"):
        for _ in range(20):
            ballot = polls.next(rater, 0, 0)
            polls.vote(rater, 0, 0, ballot["pair"], better(polls, ballot))
    results = polls.results(0, 0)
    assert len(results["between"]) == 3 and results["alpha"]["mean"] == 1
