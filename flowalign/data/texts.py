"""Texts to learn from, a line of the data each: completions, completions with a label, and preferences."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowalign.data.messages import checked_messages
from flowalign.data.prompts import Prompts
from flowalign.data.targets import LABELS
from flowalign.errors import ConfigError


def answer_of(messages: list[Any], place: str) -> str:
    """The text of a list with one message, the assistant's, as TRL's data sets of chats have completions."""
    checked = checked_messages(messages, place)
    if len(checked) != 1 or checked[0]["role"] != "assistant" or not isinstance(checked[0].get("content"), str):
        raise ConfigError(
            f"{place}: {len(checked)} messages; one of the assistant works, with those before as the prompt"
        )
    return str(checked[0]["content"])


def check_texts(record: dict[str, Any], keys: tuple[str, ...], place: str) -> None:
    """Refuse a line without a text under each of these keys; a list with the assistant's message becomes its text."""
    for key in keys:
        if isinstance(record.get(key), list):
            record[key] = answer_of(record[key], f"{place}, {key!r}")
        if not isinstance(record.get(key), str) or not record[key].strip():
            raise ConfigError(f"{place}: no text under the key {key!r}; its keys are {', '.join(record) or 'none'}")


@dataclass
class TextPreferences(Prompts):
    """Choices between two completions of a prompt, under 'chosen' and 'rejected', as TRL's data sets have them."""

    noun = "preference"

    @classmethod
    def check(cls, record: dict[str, Any], folder: Path, place: str) -> None:
        super().check(record, folder, place)
        check_texts(record, ("chosen", "rejected"), place)


@dataclass
class TextLabels(Prompts):
    """Completions under 'completion', each good or bad by its 'label'; a preference is a good and a bad one."""

    noun = "labelled completion"

    @classmethod
    def parts(cls, record: dict[str, Any]) -> list[dict[str, Any]]:
        if "completion" in record or not {"chosen", "rejected"} <= record.keys():
            return [record]
        rest = {key: value for key, value in record.items() if key not in ("chosen", "rejected")}
        return [rest | {"completion": record[key], "label": key == "chosen"} for key in ("chosen", "rejected")]

    @classmethod
    def check(cls, record: dict[str, Any], folder: Path, place: str) -> None:
        super().check(record, folder, place)
        check_texts(record, ("completion",), place)
        label = record.get("label")
        if not isinstance(label, bool | int | str) or label not in LABELS:
            raise ConfigError(f"{place}: 'label' is not true (good) or false (bad)")
        record["label"] = LABELS[label]
