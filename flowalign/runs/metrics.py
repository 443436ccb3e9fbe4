"""Metrics as JSON lines, one an iteration."""

import json
from pathlib import Path
from typing import Any

from flowalign.runs.files import write_atomically


class MetricsFile:
    """A JSON-lines file that a resumed run continues where its checkpoint left off."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: dict[str, Any]) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(record) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """All whole lines; a line cut short by a crash is left out."""
        records = []
        for line in self.path.read_text().splitlines() if self.path.exists() else []:
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return records

    def keep_before(self, iteration: int) -> None:
        """Drop the records of this iteration and later ones."""
        kept = [r for r in self.read() if r["iteration"] < iteration]
        write_atomically(self.path, "".join(json.dumps(r) + "\n" for r in kept))
