"""Files: written so that they are either old or new, never half."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from flowalign.errors import ConfigError, FlowalignError
from flowalign.runs.foreign import write_new


def check_output(path: Path, where: str, folder: bool = False) -> None:
    """Refuse, before the work, a file or a folder for its results that cannot be written.

    Args:
        where: the setting or option that names it.
    """
    try:
        if any(len(os.fsencode(part)) > 255 for part in path.parts):
            raise ConfigError(f"{where}: the name is too long")
        there = next((p for p in (path, *path.parents) if p.exists()), None)
        if there is None:
            raise ConfigError(f"{where}: the current folder is gone")
        if not there.is_dir() and (folder or there != path):
            raise ConfigError(f"{where}: {there} is a file, and a folder is wanted there")
        if there == path and there.is_dir() and not folder:
            raise ConfigError(f"{where}: {path} is a folder; give the name of a file")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: {path} cannot be written: {error}") from error
    if not os.access(there, os.W_OK):
        raise ConfigError(f"{where}: {there} cannot be written to")


def write_atomically(path: Path, text: str) -> None:
    """Replace a text file so that readers see the old or the new one, never half; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".partial-{path.name}")
    write_new(partial, text)
    os.replace(partial, path)


def write_folder(final: Path, write: Callable[[Path], None]) -> None:
    """Replace a folder by what `write` puts into another: readers see the old, the new or none, never half.

    Raises:
        FlowalignError: the disk does not take it.
    """
    partial, removed = (final.with_name(f".{what}-{final.name}") for what in ("partial", "removed"))
    for leftover in (partial, removed):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        write(partial)
        readable(partial)
        sync(partial)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise FlowalignError(f"{final} cannot be written: {error}") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if final.exists():
        os.replace(final, removed)
    os.replace(partial, final)
    sync_folder(final.parent)
    shutil.rmtree(removed, ignore_errors=True)


def readable(folder: Path) -> None:
    """Let others read all files below a folder, which safetensors writes for their owner alone."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o644)


def sync(folder: Path) -> None:
    """Make a folder and all files below it survive a crash of the machine."""
    for path in folder.rglob("*"):
        if path.is_file():
            # Windows wants a handle that may write
            with open(path, "r+b") as handle:
                os.fsync(handle.fileno())
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a crash of the machine."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
