"""Which pairs a rater is shown: those that the votes leave open, and now and then one again or a broken sample."""

import io
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flowalign.app.gallery.build import lay_out
from flowalign.app.gallery.polls import EVERY, FIRST_CATCH, Polls, broken_text
from flowalign.data.votes import CATCH, REPEAT, Votes, plain, plain_of
from flowalign.evaluation.voting import fails


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
    """The side whose sample scores higher, or is no noise."""
    first, second = polls.contest(0, 0)[plain_of(ballot["pair"])]
    shown = [
        polls.picture(0, 0, ballot["pair"], side, Path(ballot[side]["picture"]).stem) for side in ("left", "right")
    ]
    if ballot["pair"].endswith(CATCH):
        return ("left", "right")[isinstance(shown[0], bytes)]
    winner = max((first, second), key=lambda placed: placed.sample.scores["score"])
    return ("left", "right")[shown.index(winner.picture)]


def test_pairs_come_again_with_their_sides_swapped_and_are_not_counted_twice(polls: Polls) -> None:
    shown: dict[str, str] = {}
    for _ in range(EVERY * 2 + 4):
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
    for _ in range(EVERY + 2):
        polls.vote("Bob", 0, 0, polls.next("Bob", 0, 0)["pair"], "left")
    assert polls.results(0, 0)["raters"][1]["again"]["rate"] == 0
    # undone one by one, the repetition first
    polls.votes.undo("Bob", polls.contest(0, 0))
    assert polls.results(0, 0)["raters"][1]["again"]["rate"] is None


def test_raters_who_take_broken_samples_are_named(polls: Polls) -> None:
    """Ada looks; Bob takes the left side, and every second broken sample; both are known."""
    # not a coin: the sides depend on the folder's name, and at times it would be right
    misled = itertools.cycle([True, False])
    for _ in range(FIRST_CATCH + 3 * EVERY + 7):
        ballot = polls.next("Ada", 0, 0)
        polls.vote("Ada", 0, 0, ballot["pair"], better(polls, ballot))
        ballot, verdict = polls.next("Bob", 0, 0), "left"
        if ballot["pair"].endswith(CATCH):
            whole = better(polls, ballot)
            verdict = ({"left", "right"} - {whole}).pop() if next(misled) else whole
        polls.vote("Bob", 0, 0, ballot["pair"], verdict)
    results = polls.results(0, 0)
    ada, bob = results["raters"]
    assert ada["caught"]["rate"] == 1 and ada["caught"]["pairs"] == bob["caught"]["pairs"] == 4
    assert bob["caught"]["rate"] == 0.5
    (line,) = results["failing"]
    assert (
        line.startswith("Bob took the broken sample, or a tie, in") and f"the {bob['wins'] + bob['losses']} ch" in line
    )
    # they are of no use otherwise: not in the export, nor in what a reward learns from
    votes = Votes(polls.folder / "votes.sqlite")
    assert votes.caught() == {"Ada": (4, 4), "Bob": (2, 4)}
    taught = ada["wins"] + ada["losses"] + bob["wins"] + bob["losses"]
    assert len(votes.preferences()) == len(votes.of_pictures()) == taught
    assert all(plain(key) for key in polls.contest(0, 0))


def test_a_broken_sample_is_seen_to_be_broken(polls: Polls, tmp_path: Path) -> None:
    key = next(iter(polls.contest(0, 0))) + CATCH
    shown = [polls.picture(0, 0, key, side, "00" + "0" * 14) for side in ("left", "right")]
    (broken,) = (one for one in shown if isinstance(one, bytes))
    with Image.open(io.BytesIO(broken)) as picture:
        assert picture.size == (8, 8) and picture.format == "PNG"
    assert sorted(broken_text("one two three", "k").split()) == ["one", "three", "two"]


@pytest.mark.parametrize(
    "right, pairs, named", [(0, 1, False), (2, 4, True), (3, 4, False), (9, 10, False), (0, 2, True)]
)
def test_who_is_named_would_be_so_by_chance_in_one_of_forty(right: int, pairs: int, named: bool) -> None:
    """Against the sum of the binomial law, with wrong answers in 5% of the pairs."""
    chance = sum(math.comb(pairs, k) * 0.05**k * 0.95 ** (pairs - k) for k in range(pairs - right, pairs + 1))
    assert fails(right, pairs) == named == (chance < 0.025)


def test_what_the_votes_have_settled_is_not_asked(polls: Polls) -> None:
    gaps = []
    for _ in range(40):
        ballot = polls.next("Ada", 0, 0)
        polls.vote("Ada", 0, 0, ballot["pair"], better(polls, ballot))
        first, second = polls.contest(0, 0)[plain_of(ballot["pair"])]
        gaps.append(abs(first.sample.scores["score"] - second.sample.scores["score"]))
    # first the pairs that differ most; once the taste is known, those whose outcome is not yet sure
    assert np.mean(gaps[:5]) > np.mean(gaps[-10:])
    # three of the forty were repetitions, and three had a broken sample
    assert polls.results(0, 0)["enough"].startswith("34 choices so far: too few yet to train on (66 more)")


def test_raters_share_some_pairs(polls: Polls) -> None:
    for rater in ("Ada", "Bob", "Cy"):
        for _ in range(20):
            ballot = polls.next(rater, 0, 0)
            polls.vote(rater, 0, 0, ballot["pair"], better(polls, ballot))
    results = polls.results(0, 0)
    assert len(results["between"]) == 3 and results["alpha"]["mean"] == 1
