"""Texts by `POST /v1/completions` of OpenAI-compatible servers: requests of token ids, and answers checked as data."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

BYTES_OF_TOKEN, BYTES_OF_ANSWER = 1024, 65536
"""Bytes of an answer, at most: for each token, with its name and log-probability, and besides."""
ROUNDING = 1e-3
"""Largest log-probability above 0 that is rounding."""


class DrawnText(NamedTuple):
    """A text that a server drew."""

    tokens: list[int]
    """With the end token."""
    log_prob: list[float]
    """Log-probability of each token, as the server says."""
    ended: bool
    """Has an end token, was not cut at the largest length."""


class Wanted(NamedTuple):
    """Request that an answer must fit."""

    prompt: list[int]
    """Token ids of the prompt."""
    length: int
    """The most tokens of the text."""
    ends: Sequence[int]
    """Tokens that end a text."""
    vocabulary: int

    @property
    def most_bytes(self) -> int:
        """Bytes of an answer, at most."""
        return BYTES_OF_ANSWER + BYTES_OF_TOKEN * (len(self.prompt) + self.length)


def read(body: bytes, wanted: Wanted) -> tuple[DrawnText, dict[str, Any]]:
    """The text in an answer, and the whole answer.

    Raises:
        ValueError: it does not answer what was asked; says how.
    """
    try:
        answer = json.loads(body)
        [choice] = answer["choices"]
        chances = (choice.get("logprobs") or {}).get("token_logprobs")
        tokens, reason, prompt = choice.get("token_ids"), choice.get("finish_reason"), choice.get("prompt_token_ids")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no completion of one text ({type(error).__name__})") from None
    if tokens is None:
        raise ValueError("it has no token_ids: the server ignores return_token_ids, or is too old for it")
    if chances is None:
        raise ValueError("it has no log-probabilities: the server ignores logprobs")
    if not _integers(tokens, wanted.vocabulary):
        raise ValueError(f"token_ids are not one or more numbers below the vocabulary's {wanted.vocabulary}")
    if prompt is not None and prompt != wanted.prompt:
        raise ValueError("its prompt_token_ids are not the prompt's: the server changed or cut the prompt")
    if len(tokens) > wanted.length:
        raise ValueError(f"{len(tokens)} tokens, and at most {wanted.length} were asked for")
    if not isinstance(chances, list) or len(chances) != len(tokens):
        raise ValueError(f"its log-probabilities are not as many as its {len(tokens)} tokens")
    if not all(isinstance(x, int | float) and not isinstance(x, bool) and -9998 < x <= ROUNDING for x in chances):
        raise ValueError("a log-probability is no finite number up to 0")
    return DrawnText(tokens, [float(chance) for chance in chances], _ended(tokens, reason, wanted)), answer


def _integers(tokens: object, vocabulary: int) -> bool:
    """Is it a list of at least one token id?"""
    return (
        isinstance(tokens, list)
        and len(tokens) > 0
        and all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocabulary for token in tokens)
    )


def _ended(tokens: Sequence[int], reason: object, wanted: Wanted) -> bool:
    """Does the text end by an end token? Raises ValueError where it goes on after one, or something else cut it."""
    if any(token in wanted.ends for token in tokens[:-1]):
        raise ValueError("it goes on after an end token: the server ignores stop_token_ids")
    if tokens[-1] in wanted.ends:
        return True
    if len(tokens) < wanted.length:
        raise ValueError(
            f"it stops after {len(tokens)} of {wanted.length} tokens without an end token (finish_reason {reason!r}): "
            "the server has a shorter context, or ends texts by rules of its own"
        )
    return False
