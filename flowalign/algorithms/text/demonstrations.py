"""Demonstrations in the metadata of a batch's prompts."""

from collections.abc import Sequence

from flowalign.data.batches import Batch
from flowalign.errors import ConfigError


def first_rows(batch: Batch) -> list[int]:
    """The first sample of each group."""
    return [batch.group.index(number) for number in dict.fromkeys(batch.group)]


def demonstrations(batch: Batch, rows: Sequence[int], key: str) -> list[str]:
    """The demonstration of each of these rows, from the metadata.

    Raises:
        ConfigError: a prompt has none.
    """
    for row in rows:
        if key not in batch.metadata[row]:
            raise ConfigError(f"data.prompts: no '{key}' with the prompt {batch.prompts[row]!r} to learn from")
    return [str(batch.metadata[row][key]) for row in rows]


def last_members(batch: Batch) -> list[bool]:
    """Whether each sample is the last of its group."""
    last = {number: row for row, number in enumerate(batch.group)}
    return [last[number] == row for row, number in enumerate(batch.group)]
