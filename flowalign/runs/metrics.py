"""Metrics as JSON lines, one for each iteration."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowalign.errors import FlowalignError
from flowalign.runs.foreign import append, created, opened


class MetricsFile:
    """A JSON-lines file that a resumed run continues where its checkpoint left off."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: dict[str, Any]) -> None:
        append(self.path, json.dumps(record) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """All whole lines; a line cut short by a crash is left out."""
        return [record for _, record in self._lines()]

    def keep_before(self, iteration: int) -> None:
        """Drop the records of this iteration and later ones, a line at a time."""
        if not self.path.exists():
            return
        partial = self.path.with_name(f".partial-{self.path.name}")
        with created(partial) as file:
            file.writelines(line for line, record in self._lines() if record["iteration"] < iteration)
        os.replace(partial, self.path)

    def _lines(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """Each whole line with its record."""
        if not self.path.exists():
            return
        with opened(self.path) as file:
            for line in file:
                try:
                    record = json.loads(line)
                except UnicodeDecodeError as error:
                    raise FlowalignError(f"{self.path} is not UTF-8 text; without it a run goes on") from error
                except (json.JSONDecodeError, RecursionError):
                    continue
                if isinstance(record, dict) and isinstance(record.get("iteration"), int):
                    yield line.rstrip(b"\r\n") + b"\n", record
