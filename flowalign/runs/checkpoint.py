"""Checkpoints that are either whole or absent: safetensors and JSON in a folder that appears by one rename.

Beside them stands a checksum of every file. A checkpoint that was damaged afterwards is found out and passed over.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowalign.errors import FlowalignError
from flowalign.runs.files import readable, sync, sync_folder
from flowalign.runs.foreign import inside, read_json

logger = logging.getLogger(__name__)

NAME = re.compile(r"checkpoint-(\d+)")
CHECKSUMS = "checksums.json"
LEARNED = ("trainable", "ema", "optimizer", "value_head", "value_head_optimizer")
"""tensors that are useless unless they are finite"""


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

        self._damaged: set[Path] = set()

    def all(self) -> list[Path]:
        """Checkpoints, oldest first; an interrupted save never carries the name of one."""
        found = self.folder.glob("checkpoint-*") if self.folder.is_dir() else []
        return sorted((p for p in found if NAME.fullmatch(p.name)), key=_number)

    def newest(self, until: int | None = None) -> Path | None:
        """The newest checkpoint that is whole; a warning names newer ones that are damaged.

        Args:
            until: an iteration that it is not newer than.

        Raises:
            FlowalignError: all are damaged.
        """
        problems: dict[Path, str] = {}
        for path in reversed(self._until(until)):
            problem = damage(path)
            if problem is None:
                for damaged, reason in problems.items():
                    logger.warning("%s is damaged (%s); going on from %s", damaged, reason, path.name)
                return path
            self._damaged.add(path)
            problems[path] = problem
        if problems:
            listed = "; ".join(f"{path.name}: {problem}" for path, problem in problems.items())
            raise FlowalignError(
                f"every checkpoint of {self.folder} is damaged ({listed}); name=... starts another run"
            )
        return None

    def _until(self, iteration: int | None) -> list[Path]:
        return [path for path in self.all() if iteration is None or _number(path) <= iteration]

    def save(
        self,
        iteration: int,
        tensors: dict[str, dict[str, Tensor]],
        state: dict[str, Any],
        export: Callable[[Path], None] | None = None,
        good: int | None = None,
    ) -> Path:
        """Write one file of tensors per entry, state.json and what `export` adds, then let the folder appear.

        Args:
            good: an iteration whose checkpoint, or the last one before it, stays besides the newest.

        Raises:
            FlowalignError: a weight is not finite, or the disk does not take the files; earlier checkpoints stay.
        """
        for name in LEARNED:
            key = _not_finite(tensors.get(name, {}))
            if key is not None:
                raise FlowalignError(
                    f"iteration {iteration}: '{key}' ({name}) is not finite, and is not saved; --resume goes on from "
                    "the checkpoint before, with a lower training.optimizer.learning_rate or model.dtype: float32"
                )
        final = self.folder / _name(iteration)
        partial = self.folder / f".partial-{final.name}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            partial.mkdir()
            self._write(partial, tensors, state, export)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise FlowalignError(f"{final} cannot be written: {error}; earlier checkpoints stay (--resume)") from error
        if final.exists():
            os.replace(final, self.folder / f".removed-{final.name}")
        os.replace(partial, final)
        sync_folder(self.folder)
        self._damaged.discard(final)
        whole = [path for path in self.all() if path not in self._damaged]
        kept = whole[-self.keep :] + ([] if good is None else [p for p in whole if _number(p) <= good][-1:])
        for old in self.all():
            if old not in kept:
                os.replace(old, self.folder / f".removed-{old.name}")
        self._sweep()
        return final

    @staticmethod
    def _write(
        folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: Any, export: Callable[[Path], None] | None
    ) -> None:
        for name, entries in tensors.items():
            rows = {key: value.detach().cpu().contiguous() for key, value in entries.items()}
            save_file(rows, folder / f"{name}.safetensors")
        (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
        if export is not None:
            export(folder)
        sums = {str(p.relative_to(folder)): _checksum(p) for p in sorted(folder.rglob("*")) if p.is_file()}
        (folder / CHECKSUMS).write_text(json.dumps({"files": sums, "all": _sum_of(sums)}, indent=1), encoding="utf-8")
        readable(folder)
        sync(folder)

    def _sweep(self) -> None:
        """Remove what interrupted saves and removals left."""
        for leftover in [*self.folder.glob(".partial-*"), *self.folder.glob(".removed-*")]:
            shutil.rmtree(leftover)

    @staticmethod
    def state(path: Path) -> dict[str, Any]:
        """The JSON that `save` was given."""
        return read_json(path / "state.json")

    @classmethod
    def load(cls, path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """What `save` was given, of a whole checkpoint."""
        names = [name for name in _checksums(path) if name.endswith(".safetensors")]
        return {Path(name).stem: load_file(path / name) for name in names}, cls.state(path)


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint; None where its files are as they were written, and its weights finite."""
    try:
        for name, expected in _checksums(path).items():
            if _checksum(path / name) != expected:
                return f"{name} is not as it was written"
            if name.endswith(".safetensors") and Path(name).stem in LEARNED:
                with safe_open(path / name, "pt") as file:
                    names = file.keys()
                    key = next((key for key in names if _not_finite({key: file.get_tensor(key)})), None)
                if key is not None:
                    return f"{name}: '{key}' is not finite"
    except OSError as error:
        return f"{Path(error.filename or path).name}: {error.strerror}"
    except ValueError:
        return f"{CHECKSUMS} is not as it was written"
    return None


def _checksums(path: Path) -> dict[str, str]:
    """Of every file of a checkpoint, by its name; ValueError where they do not fit their own checksum."""
    written = read_json(path / CHECKSUMS)
    if not isinstance(written.get("files"), dict) or written.get("all") != _sum_of(written["files"]):
        raise ValueError(CHECKSUMS)
    sums: dict[str, str] = written["files"]
    for name in sums:
        inside(path, name)
    return sums


def _sum_of(sums: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()


def _checksum(path: Path) -> str:
    if path.is_symlink() or not path.is_file():
        raise FileNotFoundError(2, "missing", str(path))
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of a tensor that is not finite."""
    return next((key for key, value in tensors.items() if not value.isfinite().all()), None)


def _number(path: Path) -> int:
    """The iteration of a checkpoint, from its name."""
    return int(path.name.rpartition("-")[2])


def _name(iteration: int) -> str:
    return f"checkpoint-{iteration:06d}"
