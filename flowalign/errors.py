"""Errors for people: one line that says what is wrong, where, and what would work."""

import difflib
import re
from collections.abc import Iterable

SECRETS = (
    # the value beside a key that names a secret, in YAML, JSON or Python
    r"((?:api|access|secret)[_-]?key|token|password|passwd|secret|authorization)"
    r"""(["']?\s*[:=]\s*)(?:"[^"]*"|'[^']*'|[^\s,}\])]+)""",
    # keys as their makers begin them
    r"()()\b(?:sk|hf|ghp|glpat|wandb_v1)[-_][A-Za-z0-9_-]{8,}",
    # user and password of an address
    r"(://)()[^\s/@'\"]+(?=@)",
)


class FlowalignError(Exception):
    """What the user can mend. The command line prints it in one line, without secrets, and leaves with `exit_code`."""

    exit_code = 1

    def __str__(self) -> str:
        return hide(super().__str__())


class ConfigError(FlowalignError):
    """Bad configuration or input, found before any model loads."""

    exit_code = 2


def hide(text: str) -> str:
    """A text with its keys, tokens and passwords as ***: configurations are quoted where they are wrong."""
    for pattern in SECRETS:
        text = re.sub(pattern, r"\1\2***", text, flags=re.IGNORECASE)
    return text


def nearest(word: str, choices: Iterable[str]) -> str:
    """'did you mean X?' when a choice is close, else the list of choices."""
    choices = sorted(choices)
    # a misspelt word; else 'guidance_schedule' is nearer to 'guidance' than to 'guidance_2'
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.8)
    close = close or [choice for choice in choices if word.startswith(f"{choice}_")][-1:]
    close = close or difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"choose from {', '.join(choices) or 'nothing'}"
