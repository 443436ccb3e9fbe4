"""Checkpoints that are either whole or absent: safetensors and JSON in a folder that appears by one rename.

With them is a checksum of every file, so that a checkpoint that was damaged later is noticed and skipped.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowalign.errors import FlowalignError
from flowalign.runs.files import readable, sync, sync_folder
from flowalign.runs.foreign import inside, read_json

logger = logging.getLogger(__name__)

NAME = re.compile(r"checkpoint-(\d+)")
CHECKSUMS = "checksums.json"
FORMAT = 1
"""Number of the format of a run's folder; a change that older versions would misread gets the next number."""
LEARNED = ("trainable", "ema", "optimizer", "value_head", "value_head_optimizer")
"""Files of tensors that must be finite."""


def optimizer_tensors(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state_dict as flat tensors ('3.exp_avg') and JSON."""
    flat = {f"{index}.{key}": value for index, values in state["state"].items() for key, value in _flat(values).items()}
    tensors: dict[str, Tensor] = {}
    addresses = set()
    for key, value in flat.items():
        if isinstance(value, Tensor):
            # quantised moments share their code book, and a safetensors file takes no shared tensors
            tensors[key] = value.clone() if value.data_ptr() in addresses else value.contiguous()
            addresses.add(value.data_ptr())
    numbers = {key: value for key, value in flat.items() if key not in tensors}
    return tensors, {"param_groups": state["param_groups"], "numbers": numbers}


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """Flatten nested values to 'outer/inner', as 8-bit optimizers have them."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= {f"{key}/{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def optimizer_state(tensors: dict[str, Tensor], extra: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `optimizer_tensors`."""
    state: dict[int, dict[str, Any]] = {}
    for name, value in (tensors | extra.get("numbers", {})).items():
        index, _, key = name.partition(".")
        *outer, key = key.split("/")
        values = state.setdefault(int(index), {})
        for name in outer:
            values = values.setdefault(name, {})
        values[key] = value
    return {"state": state, "param_groups": extra["param_groups"]}


class Checkpoints:
    """The checkpoints of a run's folder.

    Args:
        folder: folder with `checkpoint-000010` and so on.
        keep: number of the newest checkpoints that are kept.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

        self._damaged: set[Path] = set()

    def all(self) -> list[Path]:
        """Checkpoints, oldest first; an interrupted save never has the name of a checkpoint."""
        paths = self.folder.glob("checkpoint-*") if self.folder.is_dir() else []
        return sorted((p for p in paths if NAME.fullmatch(p.name)), key=_number)

    def newest(self, until: int | None = None) -> Path | None:
        """The newest checkpoint that is whole; a warning names newer ones that are damaged.

        Args:
            until: latest iteration of the checkpoint.

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
        """Write one file of tensors per entry, state.json and the files of `export`, then let the folder appear.

        Args:
            good: an iteration whose checkpoint, or the last one before it, is kept besides the newest.

        Raises:
            FlowalignError: a weight is not finite, or the files cannot be written; earlier checkpoints are kept.
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
        retained = whole[-self.keep :] + ([] if good is None else [p for p in whole if _number(p) <= good][-1:])
        for old in self.all():
            if old not in retained:
                os.replace(old, self.folder / f".removed-{old.name}")
        self._sweep()
        return final

    @staticmethod
    def _write(
        folder: Path,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, object],
        export: Callable[[Path], None] | None,
    ) -> None:
        for name, entries in tensors.items():
            rows = {key: value.detach().cpu().contiguous() for key, value in entries.items()}
            save_file(rows, folder / f"{name}.safetensors")
        (folder / "state.json").write_text(json.dumps({"format": FORMAT, **state}), encoding="utf-8")
        if export is not None:
            export(folder)
        seal(folder)
        readable(folder)
        sync(folder)

    def _sweep(self) -> None:
        """Remove the leftovers of interrupted saves and removals."""
        for leftover in [*self.folder.glob(".partial-*"), *self.folder.glob(".removed-*")]:
            shutil.rmtree(leftover)

    @staticmethod
    def state(path: Path) -> dict[str, Any]:
        """The JSON that `save` was given."""
        state = read_json(path / "state.json")
        check_format(state, path / "state.json")
        state.pop("format", None)
        return state

    @classmethod
    def load(cls, path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Read the tensors and the state of a whole checkpoint, as `save` got them."""
        names = [name for name in _checksums(path) if name.endswith(".safetensors")]
        return {Path(name).stem: load_file(path / name) for name in names}, cls.state(path)


@contextlib.contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Context for loading a checkpoint: turn errors of one that does not fit into one line for people.

    Raises:
        FlowalignError: a key is missing, or a tensor has another shape: another model's, or another flowalign's.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError, ValueError, AssertionError) as error:
        if isinstance(error, FlowalignError):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise FlowalignError(
            f"{path} does not fit this run, or another version of flowalign wrote it ({reason}); name=... starts "
            "another run, and that version goes on with this one"
        ) from error


def check_format(written: Mapping[str, Any], file: Path) -> None:
    """Refuse a file that a later flowalign wrote; a file without a number is from before there were numbers.

    Raises:
        FlowalignError: names the file.
    """
    number = written.get("format", FORMAT)
    if type(number) is not int or not 0 < number <= FORMAT:
        raise FlowalignError(
            f"{file} has format {str(number)[:20]}, and this flowalign reads {FORMAT} at most; update it"
        )


def seal(folder: Path) -> None:
    """Write the checksums of all files below a folder into it, after sorting the metadata of its weights."""
    for file in folder.rglob("*.safetensors"):
        order_metadata(file)
    for file in folder.rglob("adapter_config.json"):
        settings = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps(_in_order(settings), indent=2, sort_keys=True), encoding="utf-8")
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / CHECKSUMS)
    sums = {p.relative_to(folder).as_posix(): _checksum(p) for p in files}
    record = {"format": FORMAT, "files": sums, "all": _sum_of(sums)}
    (folder / CHECKSUMS).write_text(json.dumps(record, indent=1), encoding="utf-8")


def order_metadata(file: Path) -> None:
    """Sort a file's metadata, whose order else differs between processes, due to safetensors and sets."""
    with open(file, "r+b") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(length))
        metadata = header.pop("__metadata__", None)
        if metadata is None:
            return
        for key, value in metadata.items():
            if value.startswith("{"):
                metadata[key] = json.dumps(_in_order(json.loads(value)), indent=2, sort_keys=True)
        whole = {"__metadata__": metadata} | header
        encoded = json.dumps(whole, separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode()
        # the header must fit where it was, since the tensors are not moved; a longer one is left as it is
        if len(encoded) <= length:
            opened.seek(8)
            opened.write(encoded.ljust(length))


def _in_order(value: object) -> object:
    """Nested settings in which lists of names are sorted, since they were sets."""
    if isinstance(value, dict):
        return {key: _in_order(nested) for key, nested in value.items()}
    if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        return sorted(value)
    return value


def check_weights(path: str | Path) -> None:
    """Refuse weights that were changed since they were written, or are not finite; a hub name is not checked.

    Args:
        path: a folder, with checksums if `seal` wrote them, or a file.

    Raises:
        FlowalignError: names the file.
    """
    folder = Path(path)
    try:
        if (folder / CHECKSUMS).is_file():
            for name, expected in _checksums(folder).items():
                if _checksum(folder / name) != expected:
                    raise FlowalignError(f"{folder / name} is not as it was written; a checkpoint may still have it")
        for file in [folder] if folder.suffix == ".safetensors" else sorted(folder.rglob("*.safetensors")):
            if file.is_file() and (key := _not_finite_in(file)) is not None:
                raise FlowalignError(f"{file}: '{key}' is not finite; weights that are no numbers make no samples")
    except (OSError, ValueError, SafetensorError) as error:
        if isinstance(error, FlowalignError):
            raise
        raise FlowalignError(f"{path} cannot be read as weights: {' '.join(str(error).split())[:200]}") from error


def _not_finite_in(file: Path) -> str | None:
    """The name of a tensor in a file that is not finite; None if all are."""
    with safe_open(file, "pt") as opened:
        names = opened.keys()
        return next((key for key in names if _not_finite({key: opened.get_tensor(key)})), None)


def damage(path: Path) -> str | None:
    """Describe the damage of a checkpoint; None if its files are as they were written, and its weights finite."""
    try:
        for name, expected in _checksums(path).items():
            if _checksum(path / name) != expected:
                return f"{name} is not as it was written"
            if name.endswith(".safetensors") and Path(name).stem in LEARNED:
                key = _not_finite_in(path / name)
                if key is not None:
                    return f"{name}: '{key}' is not finite"
    except OSError as error:
        return f"{Path(error.filename or path).name}: {error.strerror}"
    except ValueError:
        return f"{CHECKSUMS} is not as it was written"
    return None


def _checksums(path: Path) -> dict[str, str]:
    """Checksums of a checkpoint's files by their names; ValueError if these do not match their own checksum."""
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
    """The name of a tensor that is not finite; None if all are."""
    # isfinite is missing for some 8-bit formats
    widened = ((key, value.float() if value.is_floating_point() else value) for key, value in tensors.items())
    return next((key for key, value in widened if not value.isfinite().all()), None)


def _number(path: Path) -> int:
    """The iteration of a checkpoint, from its name."""
    return int(path.name.rpartition("-")[2])


def _name(iteration: int) -> str:
    return f"checkpoint-{iteration:06d}"
