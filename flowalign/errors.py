"""Errors for people: one line that says what is wrong, where, and what would work."""

import difflib
from collections.abc import Iterable


class FlowalignError(Exception):
    """What the user can mend. The command line prints it in one line and leaves with `exit_code`."""

    exit_code = 1


class ConfigError(FlowalignError):
    """Bad configuration or input, found before any model loads."""

    exit_code = 2


def nearest(word: str, choices: Iterable[str]) -> str:
    """'did you mean X?' when a choice is close, else the list of choices."""
    choices = sorted(choices)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"choose from {', '.join(choices) or 'nothing'}"
