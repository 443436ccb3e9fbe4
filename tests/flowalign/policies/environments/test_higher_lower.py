"""The game of higher and lower."""

import pytest

from flowalign.errors import ConfigError
from flowalign.policies.environments import HigherLower


def test_a_number_is_found_between_what_is_known() -> None:
    game = HigherLower()
    assert game.reset("which?", {"answer": "42"}) == "which?"
    assert [tuple(game.step(text))[:4] for text in ("50", "7", "60", "what", "9", "42")] == [
        ("-", 0.0, False, "None..50"),
        ("+", 0.0, False, "7..50"),
        # what says nothing new leaves the state as it was
        ("-", 0.0, False, "7..50"),
        ("=", 0.0, False, "7..50"),
        ("+", 0.0, False, "9..50"),
        ("", 1.0, True, None),
    ]


def test_words_of_ones_own() -> None:
    game = HigherLower(key="number", higher="Higher.", lower="Lower.", unclear="A whole number, please.")
    game.reset("which?", {"number": -3})
    assert [game.step(text).observation for text in ("-4", " 0 ", "4.5")] == [
        "Higher.",
        "Lower.",
        "A whole number, please.",
    ]


@pytest.mark.parametrize("record", [{}, {"answer": "four"}])
def test_a_prompt_without_a_whole_number_is_named(record: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"a whole number under 'answer' .* the prompt 'which\?' has"):
        HigherLower().reset("which?", record)
