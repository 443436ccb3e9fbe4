"""Files that are either old or new, never half."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Replace a text file so that readers see the old or the new one, never half."""
    partial = path.with_name(f".partial-{path.name}")
    partial.write_text(text)
    os.replace(partial, path)


def sync(folder: Path) -> None:
    """Make a folder and all files below it survive a crash of the machine."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as handle:
                os.fsync(handle.fileno())
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a crash of the machine."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
