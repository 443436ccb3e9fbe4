"""A folder that somebody else may have made: what is in it is read as data, and nothing outside it is touched.

All that reads or writes in such a folder does it here: links are refused, and so is what is no plain file (a pipe would
be waited for, a device has no end) or is larger than what it stands for can be.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from flowalign.errors import ConfigError

LARGEST_TEXT = 256 * 2**20
"""Bytes of a file of lines or of JSON, at most."""
ELSEWHERE = ("wandb",)
"""Folders of other programs in a run's folder, which flowalign never opens; wandb has links in its own."""


class ForeignError(ConfigError, ValueError):
    """A file or a folder that is not opened; the message names it and says why."""


def check_folder(folder: Path) -> None:
    """Refuse a folder in which something is no plain file and no plain folder; the folder itself may be a link.

    Raises:
        ForeignError: names the first one.
    """
    if not folder.is_dir():
        return
    for place, folders, files in os.walk(folder):
        if Path(place) == folder:
            folders[:] = [name for name in folders if name not in ELSEWHERE]
        for name in sorted([*folders, *files]):
            problem = unfit(os.lstat(os.path.join(place, name)).st_mode)
            if problem is not None:
                raise ForeignError(f"{os.path.join(place, name)} is {problem}, which a run's folder must not hold")


def check_waits(folder: Path) -> None:
    """Refuse a folder of a model in which something would be waited for; links stay, as hub caches have them.

    Raises:
        ForeignError: names the first one.
    """
    for place, _, files in os.walk(folder):
        for name in sorted(files):
            path = Path(place, name)
            if path.exists() and not (path.is_file() or path.is_dir()):
                raise ForeignError(f"{path} is a pipe, a socket or a device, which a model's folder must not hold")


def unfit(mode: int) -> str | None:
    """What makes a file of this mode one that is not opened; None for plain files and folders."""
    if stat.S_ISLNK(mode):
        return "a symbolic link"
    return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else "a pipe, a socket or a device"


def inside(folder: Path, name: Any) -> Path:
    """The path of a file by the name that something in a folder gives it.

    Raises:
        ForeignError: it is no name, leads out of the folder, or leads over a symbolic link.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise ForeignError(f"{folder}: {str(name)[:120]!r} is no file name")
    parts = Path(name).parts
    if Path(name).is_absolute() or ".." in parts:
        raise ForeignError(f"{folder}: {name[:120]!r} leads out of the folder")
    path = folder
    for part in parts:
        path = path / part
        if path.is_symlink():
            raise ForeignError(f"{path} is a symbolic link")
    return path


def opened(path: Path, most: int = LARGEST_TEXT) -> BinaryIO:
    """A plain file, open for reading.

    Raises:
        ForeignError: it is a link or no plain file, or has more than `most` bytes.
        OSError: it is not there, or cannot be read.
    """
    # without O_NONBLOCK a pipe without a writer is waited for
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        file = os.fdopen(os.open(path, flags), "rb")
    except OSError as error:
        if (problem := unfit(os.lstat(path).st_mode)) is not None:
            raise ForeignError(f"{path} is {problem}") from error
        raise
    state = os.fstat(file.fileno())
    problem = unfit(state.st_mode)
    if problem is None and state.st_size <= most:
        return file
    file.close()
    raise ForeignError(f"{path} is {problem}" if problem else f"{path} has more than {most:,} bytes")


def read_bytes(path: Path, most: int = LARGEST_TEXT) -> bytes:
    """What a plain file holds; see `opened`."""
    with opened(path, most) as file:
        return file.read()


def read_text(path: Path, most: int = LARGEST_TEXT) -> str:
    """What a plain file of UTF-8 holds; see `opened`."""
    try:
        return read_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ForeignError(f"{path} is not UTF-8 text") from error


def read_json(path: Path, most: int = LARGEST_TEXT) -> dict[str, Any]:
    """The object of a JSON file; see `opened`."""
    try:
        found = json.loads(read_text(path, most))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ForeignError):
            raise
        raise ForeignError(f"{path} is not JSON: {str(error)[:120]}") from error
    if not isinstance(found, dict):
        raise ForeignError(f"{path} holds no JSON object")
    return found


def created(path: Path) -> BinaryIO:
    """A new file, open for writing, in the place of what has its name: nothing is written through a link."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    return os.fdopen(os.open(path, flags, 0o666), "wb")


def write_new(path: Path, content: bytes | str) -> None:
    """Write a file; see `created`."""
    with created(path) as file:
        file.write(content.encode("utf-8", "replace") if isinstance(content, str) else content)


def append(path: Path, text: str) -> None:
    """Add to the end of a file, which is made where there is none; nothing is written through a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with open(os.open(path, flags, 0o666), "a", encoding="utf-8") as file:
        file.write(text)
