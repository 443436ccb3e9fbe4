"""Pictures of several sizes: a line of the prompts may have its own 'height' and 'width' in pixels."""

from collections.abc import Mapping, Sequence
from typing import Any

from flowalign.errors import ConfigError

SIDES = ("height", "width")
Size = tuple[tuple[str, int], ...]
"""The sides that a line asks for, as ('height', 64); none where the configuration decides."""


def size_of(record: Mapping[str, Any]) -> Size:
    """The size that a line's metadata ask for.

    Raises:
        ConfigError: a side is no whole number of at least 8 pixels.
    """
    if "height" not in record and "width" not in record:
        # nearly every line, and long lists are looked through in every iteration
        return ()
    size = []
    for side in SIDES:
        if record.get(side) is None:
            continue
        try:
            pixels = int(record[side])
        except (TypeError, ValueError):
            pixels = 0
        if pixels < 8 or str(pixels) != str(record[side]):
            raise ConfigError(
                f"{side} {record[side]!r} of a prompt is no number of pixels; a whole number like 512 works"
            )
        size.append((side, pixels))
    return tuple(size)


def rows_by_size(metadata: Sequence[Mapping[str, Any]]) -> dict[Size, list[int]]:
    """Rows of each size, the first row's size first."""
    rows: dict[Size, list[int]] = {}
    for row, record in enumerate(metadata):
        rows.setdefault(size_of(record), []).append(row)
    return rows


def one_size(metadata: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The size of samples that are made together, as arguments of a pipeline's call.

    Raises:
        ConfigError: they have several.
    """
    sizes = list(rows_by_size(metadata))
    if len(sizes) > 1:
        one, other = (dict(size) or "that of the configuration" for size in sizes[:2])
        raise ConfigError(f"samples of two sizes in one batch: {one} and {other}; lists of one size work here")
    return dict(sizes[0]) if sizes else {}
