"""Files: read with errors for people, written so that they are either old or new, never half."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError

from flowalign.errors import ConfigError, FlowalignError

LARGEST = 1_000_000
"""bytes of a configuration file, and values in it once its aliases are written out"""


class _Loader(yaml.SafeLoader):
    """YAML in which a key stands once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    said = f"the key '{key.value}' stands there twice"
                    raise yaml.constructor.ConstructorError(None, None, said, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """What YAML says, without Python objects.

    Raises:
        ValueError: it is no YAML, a number or a date is none, a key stands twice, or it is too deep or too large; in
            one line.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if _size(node) > LARGEST:
            raise ValueError(f"it holds more than {LARGEST:,} values")
        return None if node is None else loader.construct_document(node)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except Exception as error:
        # PyYAML raises errors of all kinds at a value that is not what its tag says
        raise ValueError(" ".join(str(error).split())) from error


def _size(node: yaml.Node | None) -> int:
    """How many values there are once aliases are written out."""
    sizes: dict[int, int | None] = {}

    def count(node: yaml.Node) -> int:
        size = sizes.setdefault(id(node), 0)
        if size is None:
            raise ValueError("a value contains itself")
        if not size:
            sizes[id(node)] = None
            below = node.value if isinstance(node, yaml.SequenceNode) else []
            if isinstance(node, yaml.MappingNode):
                below = [part for pair in node.value for part in pair]
            sizes[id(node)] = size = 1 + sum(map(count, below))
        return size

    return 0 if node is None else count(node)


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys and values of a configuration file.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    try:
        # a pipe would be waited for, a device may have no end
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is not a file, and a configuration is one")
        if path.stat().st_size > LARGEST:
            raise ConfigError(f"{path} has more than {LARGEST:,} bytes, and is no configuration")
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"no configuration at {path}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not readable YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no configuration: its top level must be keys and values")
    return values


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
    partial.write_text(text, encoding="utf-8")
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
