"""Writing files so that they are either old or new, never half."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from flowalign.errors import ConfigError, FlowalignError
from flowalign.runs.foreign import write_new


def check_output(path: Path, where: str, folder: bool = False) -> None:
    """Refuse a file or a folder for results that cannot be written, before any work is done.

    Args:
        where: name of the setting or option for it.
    """
    try:
        if any(len(os.fsencode(part)) > 255 for part in path.parts):
            raise ConfigError(f"{where}: the name is too long")
        existing = next((p for p in (path, *path.parents) if p.exists()), None)
        if existing is None:
            raise ConfigError(f"{where}: the current folder is gone")
        if not existing.is_dir() and (folder or existing != path):
            raise ConfigError(f"{where}: {existing} is a file, and a folder is wanted there")
        if existing == path and existing.is_dir() and not folder:
            raise ConfigError(f"{where}: {path} is a folder; give the name of a file")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: {path} cannot be written: {error}") from error
    if not os.access(existing, os.W_OK):
        raise ConfigError(f"{where}: {existing} cannot be written to")


def write_atomically(path: Path, text: str) -> None:
    """Replace a text file so that readers see the old or the new one, never half; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".partial-{path.name}")
    write_new(partial, text)
    os.replace(partial, path)


def write_folder(final: Path, write: Callable[[Path], None]) -> None:
    """Replace a folder by a new one that `write` fills: readers see the old, the new or none, never half.

    Raises:
        FlowalignError: the folder cannot be written.
    """
    partial, removed = (final.with_name(f".{prefix}-{final.name}") for prefix in ("partial", "removed"))
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
    """Let other users read all files below a folder, since safetensors makes files that only their owner can read."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o644)


def sync(folder: Path) -> None:
    """Make a folder and all files below it survive a crash of the machine."""
    for path in folder.rglob("*"):
        if path.is_file():
            # Windows needs a handle that may write
            with open(path, "r+b") as handle:
                os.fsync(handle.fileno())
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a crash of the machine."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
