"""Files: read with errors for people, written so that they are either old or new, never half."""

import os
from pathlib import Path
from typing import Any

import yaml

from flowalign.errors import ConfigError


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys and values of a configuration file.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    try:
        values = yaml.safe_load(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"no configuration at {path}") from error
    except (yaml.YAMLError, UnicodeDecodeError, IsADirectoryError) as error:
        raise ConfigError(f"{path} is not readable YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no configuration: its top level must be keys and values")
    return values


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
