"""Records of samples: tensors and lists of one entry a sample, of which rows can be taken and joined."""

from collections.abc import Sequence
from dataclasses import Field, dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from samplers.stored import Stored

SHARED = {"shared": True}
"""Metadata of a field whose tensor has no row for each sample."""


@dataclass
class Rows:
    """Base of records of B samples: tensors [B, ...], lists of B entries (or empty), and dictionaries of such tensors.

    A field of another kind that can be joined (it has a `cat`) has rows as well. What is None or a plain value (a
    number, a function) is the whole record's, as is a field with metadata `SHARED`. The first field has rows.
    """

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def __getitem__(self, rows: Tensor | Sequence[int] | slice) -> Self:
        """Some of the samples, in this order; one may come several times."""
        return self.take(rows)

    def take(self, rows: Tensor | Sequence[int] | slice, **instead: object) -> Self:
        """Some of the samples.

        Args:
            instead: values of fields that are not taken from this record.
        """
        taken = {f.name: _take(getattr(self, f.name), rows) for f in self._by_row() if f.name not in instead}
        return replace(self, **taken, **instead)

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Join records; what is the whole record's comes from the first."""
        first = parts[0]
        return replace(first, **{f.name: _cat([getattr(piece, f.name) for piece in parts]) for f in first._by_row()})

    def to(self, device: torch.device | str) -> Self:
        """The same with its tensors on another device."""
        return replace(self, **{name: value.to(device) for name, value in self.tensors().items()})

    def tensors(self) -> dict[str, Tensor]:
        """The tensors it is made of, by name; what is stored on the host comes to the device."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        whole = {name: value.whole() if isinstance(value, Stored) else value for name, value in values.items()}
        return {name: value for name, value in whole.items() if isinstance(value, Tensor)}

    def _by_row(self) -> list[Field[Any]]:
        return [f for f in fields(self) if "shared" not in f.metadata]


def distinct_rows(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The first row of every different number of [N]: [M] rows, and [N] which of the M a row is alike to."""
    known, inverse = numbers.unique(return_inverse=True)
    rows = torch.arange(len(numbers), device=numbers.device)
    return torch.full_like(known, len(numbers)).scatter_reduce(0, inverse, rows, "amin"), inverse


def _take(value: Any, rows: Tensor | Sequence[int] | slice) -> Any:
    if isinstance(value, dict):
        return {name: values[rows] for name, values in value.items()}
    if isinstance(value, list):
        if isinstance(rows, slice):
            return value[rows]
        numbers = rows.tolist() if isinstance(rows, Tensor) else rows
        return [value[i] for i in numbers] if value else []
    if isinstance(value, Stored):
        return value.take(rows)
    return value[rows] if isinstance(value, Tensor) or hasattr(value, "cat") else value


def _cat(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        return None if any(value is None for value in values) else torch.cat(list(values))
    if isinstance(first, dict):
        return {name: torch.cat([value[name] for value in values]) for name in first}
    if isinstance(first, list):
        # what one of them lacks, the whole lacks
        if any(value is None for value in values):
            return None
        return [entry for value in values for entry in value]
    return type(first).cat(values) if hasattr(first, "cat") else first
