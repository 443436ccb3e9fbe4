"""Score cards: one hash for one protocol, and the name of what differs."""

import json
from pathlib import Path

import pytest

from flowalign.errors import ConfigError
from flowalign.evaluation.card import SAMPLING, check_same_protocol, differing, read_card, score_card

SAMPLES = {"prompts": ["a", "a", "b", "b"], "metadata": [{}] * 4, "seeds": [5, 6, 7, 8], "versions": {"torch": "2.8"}}


def card(**changes):
    settings = {
        "sampling": {"steps": 4, "batch_size": 8, "sigmas": None},
        "rewards": [{"name": "shapes", "weight": 1.0}],
    }
    return score_card(**(SAMPLES | settings | changes))


def test_a_card_is_the_protocol_and_nothing_else():
    assert (card()["prompts"], card()["samples"], card()["seeds"]) == (2, 4, [5, 8])
    assert card() == card(sampling={"steps": 4, "batch_size": 2, "negative_prompt": ""})
    assert differing(card(), card()) == {}


@pytest.mark.parametrize(
    ("changes", "key", "values"),
    [
        ({"sampling": {"steps": 6}}, "sampling.steps", "4 against 6"),
        ({"versions": {"torch": "2.9"}}, "versions.torch", "2.8 against 2.9"),
        ({"rewards": [{"name": "shapes", "weight": 2.0}]}, "rewards", "shapes against shapes (weight 2.0)"),
        ({"metadata": [{"count": 1}] * 4}, "prompts_sha256", " against "),
    ],
)
def test_what_differs_is_named(changes, key, values):
    differences = differing(card(), card(**changes))
    assert list(differences) == [key] and values in differences[key]
    assert card(**changes)["sha256"] != card()["sha256"]
    cards = {"one": card(), "two": card(**changes)}
    with pytest.raises(ConfigError, match=f"one and two were measured by different protocols .{key}.*; do that"):
        check_same_protocol(cards, "do that")
    if key.startswith(SAMPLING):
        check_same_protocol(cards, "do that", apart_from=SAMPLING)


def test_a_changed_card_is_refused(tmp_path: Path):
    file = tmp_path / "card.json"
    file.write_text(json.dumps(card()))
    assert read_card(file) == card()
    for text in (json.dumps(card() | {"samples": 9}), "[]", "{"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="no score card"):
            read_card(file)
