"""Pictures along a line of models, such as the strengths of a LoRA: a folder whose page in the gallery has a slider.

slider.json     {"title", "prompts", "positions": [{"label", "figures": {name: {"mean", "low", "high"}}, "pictures"}]}
*.webp          pictures that a position names, one for each prompt
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flowalign.runs.files import write_folder
from flowalign.runs.previews import save_small
from flowalign.runs.samples import Picture

SLIDER = "slider.json"
SHOWN = 12
"""Most prompts."""
SIDE = 512
"""Pixels of a picture's longer side, at most."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """One model of the line."""

    label: str
    figures: Mapping[str, Mapping[str, float | None]]
    """Mean and the ends of its 95% interval, `mean`, `low` and `high`, by name."""
    pictures: Sequence[Picture]
    """A picture for each prompt, of the same seeds at every position."""


def save_slider(folder: Path, title: str, prompts: Sequence[str], positions: Sequence[Position]) -> None:
    """Write the folder; an earlier one is replaced.

    Args:
        title: name of what differs between the positions.
        prompts: prompts of the pictures.
    """
    write_folder(folder, partial(_write, title=title, prompts=prompts, positions=positions))


def _write(folder: Path, title: str, prompts: Sequence[str], positions: Sequence[Position]) -> None:
    lines = [
        {
            "label": position.label,
            "figures": {name: dict(figure) for name, figure in position.figures.items()},
            "pictures": [save_small(folder / f"{n:02d}-{i:02d}", p, SIDE) for i, p in enumerate(position.pictures)],
        }
        for n, position in enumerate(positions)
    ]
    record = {"title": title, "prompts": list(prompts), "positions": lines}
    (folder / SLIDER).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
