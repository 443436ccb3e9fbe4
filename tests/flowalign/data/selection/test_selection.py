"""Prompt selection: what it picks, what it learns, and that a checkpoint keeps it."""

import json
from collections import Counter

import numpy as np
import pytest

from flowalign.config import load, recipe
from flowalign.data import Prompts
from flowalign.data.batches import draw_batch
from flowalign.data.selection.mopps import MoPPS
from flowalign.data.selection.sec import SEC
from flowalign.data.selection.shares import Shares
from flowalign.data.selection.shuffled import Shuffled
from flowalign.data.selection.stages import Stages
from flowalign.data.selection.together import Together
from flowalign.errors import ConfigError

PROMPTS = Prompts([f"p{i}" for i in range(60)], [{"category": "abc"[i % 3]} for i in range(60)])
RATES = np.linspace(0, 1, 60)
"""each prompt's true success rate"""


def test_shuffled_goes_through_the_list_before_it_repeats() -> None:
    selection = Shuffled()
    picks = [pick for iteration in range(15) for pick in selection.picks(PROMPTS, iteration, 8, 3)]
    assert sorted(picks[:60]) == list(range(60)) == sorted(picks[60:])
    assert picks[:60] != picks[60:]
    batch = draw_batch(PROMPTS, 4, 8, 2, 3, False)
    assert batch.picks[::2] == picks[32:40]


def test_what_belongs_together_comes_in_one_iteration() -> None:
    pairs = Prompts([f"q{i}" for i in range(20)], [{"pair": i % 10} for i in range(20)])
    selection = Together()
    picks = [selection.picks(pairs, iteration, 4, 3) for iteration in range(10)]
    for drawn in picks:
        assert sorted(Counter(pick % 10 for pick in drawn).values()) == [2, 2]
    flat = [pick for drawn in picks for pick in drawn]
    assert sorted(flat[:20]) == list(range(20)) == sorted(flat[20:])
    assert flat[:20] != flat[20:]

    again = Together()
    again.load_state_dict(json.loads(json.dumps({"drawn": 12})))
    assert again.picks(pairs, 3, 4, 3) == picks[3]
    alone = [pick for i in range(15) for pick in Together("missing").picks(PROMPTS, i, 60, 0)]
    assert sorted(alone) == sorted(15 * list(range(60)))


def test_stages_come_one_after_the_other_and_a_checkpoint_keeps_the_place() -> None:
    selection = Stages("category", {"b": 0, "c": 3, "a": 5})
    stages = [{PROMPTS.metadata[i]["category"] for i in selection.picks(PROMPTS, n, 8, 3)} for n in range(7)]
    assert stages == [{"b"}] * 3 + [{"c"}] * 2 + [{"a"}] * 2
    again = Stages("category", {"b": 0, "c": 3, "a": 5})
    again.load_state_dict(json.loads(json.dumps(selection.state_dict())))
    following = selection.picks(PROMPTS, 7, 24, 3)
    assert again.picks(PROMPTS, 7, 24, 3) == following
    # a stage's prompts all come before one comes again: 16 had been drawn of its 20
    assert len(set(following[4:])) == 20

    mixed = Stages("category", {"b": 0, "c": 1, "a": 2}, earlier=0.25)
    mixed.picks(PROMPTS, 0, 8, 3)
    drawn = [Counter(PROMPTS.metadata[i]["category"] for i in mixed.picks(PROMPTS, n, 8, 3)) for n in (1, 2)]
    assert drawn == [{"c": 6, "b": 2}, {"a": 6, "c": 2}]
    with pytest.raises(ConfigError, match="no prompt has 'z' under 'category'"):
        Stages("category", {"z": 0}).picks(PROMPTS, 0, 1, 0)
    with pytest.raises(ValueError, match="the lowest 0"):
        Stages("category", {"a": 1})


def test_mopps_finds_the_prompts_of_middling_difficulty() -> None:
    selection, random = MoPPS(candidates=4, memory=1.0), np.random.default_rng(0)
    early, late = [], []
    for iteration in range(120):
        picks = selection.picks(PROMPTS, iteration, 6, 0)
        assert len(set(picks)) == 6
        (early if iteration < 10 else late).extend(abs(RATES[pick] - 0.5) for pick in picks)
        success = random.binomial(8, RATES[picks]) / 8
        selection.learn(picks, PROMPTS, success.tolist(), [0.0] * 6)
    assert np.mean(late[-300:]) < 0.6 * np.mean(early)


def test_mopps_forgets_what_was_long_ago() -> None:
    selection = MoPPS(memory=0.5, members=4)
    for rate in (0.0, 0.0, 1.0, 1.0, 1.0):
        selection.learn([7], PROMPTS, [rate], [0.0])
    right, wrong = selection.evidence[7]
    assert (right, wrong) == (4 + 2 + 1, 4 * (0.125 + 0.0625))


def test_sec_prefers_the_category_that_pays_and_follows_when_it_changes() -> None:
    selection = SEC(rate=0.5, temperature=0.2)
    for paying in ("b", "c"):
        for iteration in range(40):
            picks = selection.picks(PROMPTS, iteration, 6, 0)
            names = [PROMPTS.metadata[pick]["category"] for pick in picks]
            selection.learn(picks, PROMPTS, [0.0] * 6, [1.0 if name == paying else 0.1 for name in names])
        picked = Counter(PROMPTS.metadata[p]["category"] for i in range(50) for p in selection.picks(PROMPTS, i, 6, 9))
        assert picked[paying] > 0.8 * 300


@pytest.mark.parametrize("selection", [Shuffled(), MoPPS(), SEC()], ids=["shuffled", "mopps", "sec"])
def test_state_survives_a_checkpoint(selection) -> None:  # type: ignore[no-untyped-def]
    selection.picks(PROMPTS, 4, 8, 1)
    selection.learn([3, 4, 5], PROMPTS, [0.1, 0.5, 0.9], [0.3, 0.2, 0.1])
    again = type(selection)()
    again.load_state_dict(json.loads(json.dumps(selection.state_dict())))
    assert again.picks(PROMPTS, 5, 8, 1) == selection.picks(PROMPTS, 5, 8, 1)
    assert again.state_dict() == selection.state_dict()


def test_a_list_shorter_than_the_iteration_is_used_again() -> None:
    few = Prompts(["a", "b"], [{}, {}])
    assert Counter(MoPPS().picks(few, 0, 6, 0)) == {0: 3, 1: 3}


def test_wrong_settings_are_said_before_a_model_loads() -> None:
    for selection, message in (
        ("{name: mops}", "did you mean 'mopps'"),
        ("{name: mopps, memory: 2}", "memory in \\(0, 1\\]"),
        ("{name: sec, rat: 0.1}", "did you mean 'rate'"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(recipe("tiny_sd3/flow_grpo"), [f"data.selection={selection}"]).check(1)


def test_shares_hold_exactly_and_go_on_after_a_checkpoint() -> None:
    selection = Shares("category", {"a": 2, "c": 1})
    picks = [selection.picks(PROMPTS, iteration, 6, 3) for iteration in range(20)]
    for drawn in picks:
        assert sorted("abc"[pick % 3] for pick in drawn) == ["a"] * 4 + ["c"] * 2
    own = [pick for drawn in picks for pick in drawn if pick % 3 == 0]
    assert sorted(own[:20]) == list(range(0, 60, 3)) == sorted(own[20:40]) and own[:20] != own[20:40]
    again = Shares("category", {"a": 2, "c": 1})
    again.load_state_dict(json.loads(json.dumps({"drawn": {"a": 8, "c": 4}})))
    assert again.picks(PROMPTS, 2, 6, 3) == picks[2]
    with pytest.raises(ConfigError, match="data.selection.shares: no prompt has 'd' under 'category'"):
        Shares("category", {"a": 1, "d": 1}).picks(PROMPTS, 0, 2, 0)
