"""Results in a run's folder, for people who work in Python."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowalign.runs.metrics import MetricsFile


@dataclass(repr=False)
class Result:
    """A finished or running training."""

    folder: Path

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r}, {len(self.metrics)} iterations)"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of each iteration."""
        return MetricsFile(self.folder / "metrics.jsonl").read()

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Metrics of each evaluation: means over the held-out prompts."""
        return MetricsFile(self.folder / "evaluations.jsonl").read()

    @property
    def lora(self) -> Path | None:
        """Folder of the adapter, for plain diffusers or transformers; None if there is none (yet)."""
        return self.folder / "lora" if (self.folder / "lora").is_dir() else None
