"""Prompts that are made easier or harder, and instructions that evolve: the numbers by hand, and a real writer."""

import json
import math

import pytest

from flowalign.data import ASSETS, Prompts
from flowalign.data.selection.augmented import Augmented
from flowalign.data.selection.instructions import Instructions
from flowalign.errors import ConfigError
from rewards.judges.base import Question
from rewards.judges.local import Local


def listed() -> Prompts:
    solution = {"solution": "one two three four five six seven eight"}
    return Prompts([f"p{i}" for i in range(4)], [solution, {"image": "a.png"}, solution | {"image": "b.png"}, {}])


def test_hard_prompts_get_a_part_of_their_solution_and_easy_ones_noise() -> None:
    prompts = listed()
    selection = Augmented(template="{clue}|{prompt}", window=2, strength=2.0, noise=0.5)
    first = selection.picks(prompts, 0, 4, 1)
    assert sorted(first) == [0, 1, 2, 3]
    selection.learn([3], prompts, [1.0], [0.1])
    rates = {0: 0.0, 1: 1.0, 2: 0.5, 3: 0.1}
    for _ in range(2):
        # the first mean, 1, is older than the window
        selection.learn(first, prompts, [rates[pick] for pick in first], [0.1] * 4)
    # the mean of the last two iterations is 0.4
    assert selection.difficulty(0) == pytest.approx(0.4) and selection.difficulty(1) == pytest.approx(-0.6)
    second = selection.picks(prompts, 1, 4, 1)
    made = {prompts.texts[pick][-2:]: (prompts.texts[pick], prompts.metadata[pick]) for pick in second}
    assert made["p0"][0] == "one two three four five six|p0", "0.8 of eight words"
    assert made["p1"] == ("p1", {"image": "a.png", "image_noise": 0.3})
    assert made["p2"][1]["image_noise"] == 0.05 and made["p3"] == ("p3", {})
    selection.learn(second, prompts, [1.0] * 4, [0.1] * 4)
    assert selection.last == dict.fromkeys(range(4), 1.0), "a variant's reward is its prompt's"

    again, fresh = Augmented(template="{clue}|{prompt}", window=2, strength=2.0), listed()
    again.load_state_dict(json.loads(json.dumps(selection.state_dict())))
    assert again.picks(fresh, 2, 4, 1) == selection.picks(prompts, 2, 4, 1) and fresh == prompts
    with pytest.raises(ConfigError, match="no prompt has 'solution'"):
        Augmented().picks(Prompts(["p"], [{}]), 0, 1, 0)


def test_instructions_are_credited_pruned_and_rewritten() -> None:
    prompts = Prompts([f"{i}+25=" for i in range(10, 18)], [{} for _ in range(8)])
    selection = Instructions(
        ["", "1=1", "2=2"],
        Local(model=str(ASSETS / "tiny_lm")),
        join="|",
        every=2,
        memory=0.5,
        temperature=0.5,
        shown=1,
        template="{experience}{instruction}=",
        most=3,
    )
    assert selection.chances() == pytest.approx([1 / 3] * 3)
    rates = {"": 0.5, "1=1": 1.0, "2=2": 0.0}
    picks = selection.picks(prompts, 0, 32, 3)
    assert sorted(set(prompts.texts[:8])) == sorted({prompts.texts[pick].rpartition("|")[2] for pick in picks})
    under = [prompts.texts[pick].rpartition("|")[0] for pick in picks]
    assert set(under) == set(rates)
    selection.learn(picks, prompts, [rates[text] for text in under], [0.1] * 32)
    assert selection.credit == rates
    weights = [math.exp(rate / 0.5) for rate in rates.values()]
    assert selection.chances() == pytest.approx([weight / sum(weights) for weight in weights])
    one = under.index("1=1")
    selection.learn([picks[one]], prompts, [0.0], [0.1])
    # it had 1, of which half is kept; the worst is dropped and another one written
    assert selection.credit[""] == 0.5 and selection.credit["1=1"] == 0.5 and "2=2" not in selection.credit
    (written,) = set(selection.credit) - set(rates)
    assert selection.credit[written] is None and written.isdigit()
    asked = f"0.00: {min(prompts.texts[:8])}1=1="
    judge = Local(model=str(ASSETS / "tiny_lm")).build("test")
    assert judge.reply([Question((), asked)], 1.0, 3, 2) == [written]

    again, fresh = Instructions([""], join="|"), Prompts(prompts.texts[:8], prompts.metadata[:8])
    again.load_state_dict(json.loads(json.dumps(selection.state_dict())))
    again.temperature = selection.temperature
    assert again.picks(fresh, 5, 8, 3) == selection.picks(prompts, 5, 8, 3) and fresh == prompts


def test_the_last_instruction_stays() -> None:
    prompts = Prompts(["p"], [{}])
    selection = Instructions(["a", "b"], every=1, replaced=5)
    for iteration in range(3):
        picks = selection.picks(prompts, iteration, 8, 0)
        selection.learn(picks, prompts, [float("b" in prompts.texts[pick]) for pick in picks], [0.0] * 8)
    assert list(selection.credit) == ["b"]
