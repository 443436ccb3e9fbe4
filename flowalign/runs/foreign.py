"""A folder that somebody else may have made: its files are read as data, and nothing outside of it is touched.

All reads and writes in such a folder go through this module. It refuses links, files that are not plain (a pipe would
block, a device has no end) and files that are larger than their kind can be.
"""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from flowalign.errors import ConfigError

LARGEST_TEXT = 256 * 2**20
"""Bytes of a file of lines or of JSON, at most."""
ELSEWHERE = ("wandb",)
"""Folders of other programs in a run's folder, which flowalign never opens; wandb's folder has links."""


class ForeignError(ConfigError, ValueError):
    """A file or a folder that is not opened; the message names it and says why."""


def check_folder(folder: Path) -> None:
    """Refuse a folder that has anything but plain files and folders in it; the folder itself may be a link.

    Raises:
        ForeignError: names the first one.
    """
    if not folder.is_dir():
        return
    for directory, folders, files in os.walk(folder):
        if Path(directory) == folder:
            folders[:] = [name for name in folders if name not in ELSEWHERE]
        for name in sorted([*folders, *files]):
            problem = unfit(os.lstat(os.path.join(directory, name)).st_mode)
            if problem is not None:
                raise ForeignError(f"{os.path.join(directory, name)} is {problem}, which a run's folder must not hold")


def check_waits(folder: Path) -> None:
    """Refuse a model's folder with a file that would block, such as a pipe; links are allowed, as in hub caches.

    Raises:
        ForeignError: names the first one.
    """
    for directory, _, files in os.walk(folder):
        for name in sorted(files):
            path = Path(directory, name)
            if path.exists() and not (path.is_file() or path.is_dir()):
                raise ForeignError(f"{path} is a pipe, a socket or a device, which a model's folder must not hold")


def unfit(mode: int) -> str | None:
    """Name the kind of a file of this mode if it must not be opened; None for plain files and folders."""
    if stat.S_ISLNK(mode):
        return "a symbolic link"
    return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else "a pipe, a socket or a device"


def inside(folder: Path, name: object) -> Path:
    """The path of a file in a folder, by a name that was read from the folder's data.

    Raises:
        ForeignError: it is no name, leads out of the folder, or leads through a symbolic link.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise ForeignError(f"{folder}: {str(name)[:120]!r} is no file name")
    components = Path(name).parts
    if Path(name).is_absolute() or ".." in components:
        raise ForeignError(f"{folder}: {name[:120]!r} leads out of the folder")
    path = folder
    for component in components:
        path = path / component
        if path.is_symlink():
            raise ForeignError(f"{path} is a symbolic link")
    return path


def opened(path: Path, most: int = LARGEST_TEXT) -> BinaryIO:
    """A plain file, open for reading.

    Raises:
        ForeignError: it is a link or no plain file, or has more than `most` bytes.
        OSError: it is not there, or cannot be read.
    """
    # without O_NONBLOCK this blocks at a pipe that nobody writes to
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        number = os.open(path, flags)
    except OSError as error:
        if (problem := unfit(os.lstat(path).st_mode)) is not None:
            raise ForeignError(f"{path} is {problem}") from error
        raise
    if stat.S_ISDIR(os.fstat(number).st_mode):
        os.close(number)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    file = os.fdopen(number, "rb")
    state = os.fstat(file.fileno())
    problem = unfit(state.st_mode)
    if problem is None and state.st_size <= most:
        return file
    file.close()
    raise ForeignError(f"{path} is {problem}" if problem else f"{path} has more than {most:,} bytes")


def read_bytes(path: Path, most: int = LARGEST_TEXT) -> bytes:
    """Read the bytes of a plain file; see `opened`."""
    with opened(path, most) as file:
        return file.read()


def read_text(path: Path, most: int = LARGEST_TEXT) -> str:
    """Read the text of a plain UTF-8 file; see `opened`."""
    try:
        return read_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ForeignError(f"{path} is not UTF-8 text") from error


def read_json(path: Path, most: int = LARGEST_TEXT) -> dict[str, Any]:
    """Read the object of a JSON file; see `opened`."""
    try:
        values = json.loads(read_text(path, most))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ForeignError):
            raise
        raise ForeignError(f"{path} is not JSON: {str(error)[:120]}") from error
    if not isinstance(values, dict):
        raise ForeignError(f"{path} holds no JSON object")
    return values


def created(path: Path) -> BinaryIO:
    """Open a new file for writing; an existing file or link of that name is removed first, never written through."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    return os.fdopen(os.open(path, flags, 0o666), "wb")


def write_new(path: Path, content: bytes | str) -> None:
    """Write a file; see `created`."""
    with created(path) as file:
        file.write(content.encode("utf-8", "replace") if isinstance(content, str) else content)


def append(path: Path, text: str) -> None:
    """Add text to the end of a file, which is made if it is missing; a link is never followed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with open(os.open(path, flags, 0o666), "a", encoding="utf-8") as file:
        file.write(text)
