"""Prompts that are lists of messages, in the form of chat templates: a role and a text each."""

from collections.abc import Mapping, Sequence
from typing import Any

from flowalign.errors import ConfigError

ROLES = ("system", "developer", "user", "assistant", "tool")
Messages = list[dict[str, Any]]
MESSAGES = "prompt_messages"
"""Key of the metadata that has the messages of a prompt that is a list of them."""


def checked_messages(given: Sequence[Any], place: str) -> Messages:
    """Messages as they are.

    Raises:
        ConfigError: one has no role or no text, or there is none.
    """
    if not given:
        raise ConfigError(f"{place}: an empty list of messages")
    for number, message in enumerate(given, 1):
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            raise ConfigError(f"{place}: message {number} has no role; {', '.join(ROLES)} work")
        calls = message["role"] == "assistant" and message.get("tool_calls")
        if not isinstance(message.get("content"), str) and not calls:
            raise ConfigError(f"{place}: message {number} ({message['role']}) has no text under 'content'")
    return [dict(message) for message in given]


def readable(messages: Sequence[Mapping[str, Any]]) -> str:
    """Messages as a text for people and rewards: a single user's words, or each role with what it said."""
    if len(messages) == 1:
        return str(messages[0].get("content") or "")
    return "\n".join(
        f"{message['role']}: {message.get('content') or message.get('tool_calls')}" for message in messages
    )
