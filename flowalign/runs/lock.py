"""One training at a time in a run's folder."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from flowalign.errors import ConfigError
from flowalign.runs.foreign import check_folder


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Context in which no other process trains into this folder. The lock ends with its process, also if that crashes.

    Raises:
        ConfigError: another process trains there, or the folder has a link or a pipe in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    check_folder(folder)
    lock, owner = FileLock(folder / ".lock"), folder / ".lock_owner"
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        process = owner.read_text(encoding="utf-8") if owner.exists() else "that has just begun"
        raise ConfigError(f"{folder} is being trained by process {process}; name=... starts another run") from error
    try:
        owner.write_text(str(os.getpid()), encoding="utf-8")
        yield
    finally:
        lock.release()
