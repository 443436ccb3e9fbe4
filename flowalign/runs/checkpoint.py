"""Checkpoints that are either whole or absent: safetensors and JSON in a folder that appears by one rename."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from flowalign.runs.files import sync, sync_folder

NAME = re.compile(r"checkpoint-(\d+)")


def optimizer_tensors(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state_dict as flat tensors ('3.exp_avg') and JSON."""
    flat = {f"{index}.{key}": value for index, values in state["state"].items() for key, value in _flat(values).items()}
    tensors = {key: value.contiguous() for key, value in flat.items() if isinstance(value, Tensor)}
    numbers = {key: value for key, value in flat.items() if key not in tensors}
    return tensors, {"param_groups": state["param_groups"], "numbers": numbers}


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """8-bit optimizers nest what they quantise: 'outer/inner'."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= {f"{key}/{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def optimizer_state(tensors: dict[str, Tensor], rest: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `optimizer_tensors`."""
    state: dict[int, dict[str, Any]] = {}
    for name, value in (tensors | rest.get("numbers", {})).items():
        index, _, key = name.partition(".")
        *outer, key = key.split("/")
        place = state.setdefault(int(index), {})
        for name in outer:
            place = place.setdefault(name, {})
        place[key] = value
    return {"state": state, "param_groups": rest["param_groups"]}


class Checkpoints:
    """The checkpoints of a run's folder.

    Args:
        folder: holds `checkpoint-000010` and so on.
        keep: how many of the newest stay.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def all(self) -> list[Path]:
        """Whole checkpoints, oldest first; an interrupted save never carries the name of one."""
        found = self.folder.glob("checkpoint-*") if self.folder.is_dir() else []
        return sorted((p for p in found if NAME.fullmatch(p.name)), key=lambda p: p.name)

    def until(self, iteration: int) -> Path | None:
        """The newest checkpoint that is not newer than this iteration."""
        found = [path for path in self.all() if path.name <= _name(iteration)]
        return found[-1] if found else None

    def save(
        self,
        iteration: int,
        tensors: dict[str, dict[str, Tensor]],
        state: dict[str, Any],
        export: Callable[[Path], None],
        good: int | None = None,
    ) -> Path:
        """Write one file of tensors per entry, state.json and what `export` adds, then let the folder appear.

        Args:
            good: an iteration whose checkpoint, or the last one before it, stays besides the newest.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sweep()
        final = self.folder / _name(iteration)
        partial = self.folder / f".partial-{final.name}"
        partial.mkdir()
        for name, entries in tensors.items():
            rows = {key: value.detach().cpu().contiguous() for key, value in entries.items()}
            save_file(rows, partial / f"{name}.safetensors")
        (partial / "state.json").write_text(json.dumps(state))
        export(partial)
        sync(partial)
        if final.exists():
            os.replace(final, self.folder / f".removed-{final.name}")
        os.replace(partial, final)
        sync_folder(self.folder)
        also = None if good is None else self.until(good)
        for old in self.all()[: -self.keep]:
            if old != also:
                os.replace(old, self.folder / f".removed-{old.name}")
        self._sweep()
        return final

    def _sweep(self) -> None:
        """Remove what interrupted saves and removals left."""
        for leftover in [*self.folder.glob(".partial-*"), *self.folder.glob(".removed-*")]:
            shutil.rmtree(leftover)

    @staticmethod
    def load(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """What `save` was given."""
        tensors = {file.stem: load_file(file) for file in path.glob("*.safetensors")}
        return tensors, json.loads((path / "state.json").read_text())


def _name(iteration: int) -> str:
    return f"checkpoint-{iteration:06d}"
