"""YAML, read with errors for people."""

from pathlib import Path
from typing import Any

import yaml

from flowalign.errors import ConfigError

LARGEST = 1_000_000
"""Bytes of a configuration file, and values in it once its aliases are written out."""


class _Loader(yaml.SafeLoader):
    """Loader that refuses a key that is there twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    problem = f"the key '{key.value}' stands there twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """Parse YAML of plain values, without Python objects.

    Raises:
        ValueError: it is no YAML, has a wrong number or date, has a key twice, or is too deep or too large; the message
            is one line.
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
        # PyYAML raises errors of all kinds at a value that does not fit its tag
        raise ValueError(" ".join(str(error).split())) from error


def _size(node: yaml.Node | None) -> int:
    """Number of values after each alias is replaced by its values."""
    sizes: dict[int, int | None] = {}

    def count(node: yaml.Node) -> int:
        size = sizes.setdefault(id(node), 0)
        if size is None:
            raise ValueError("a value contains itself")
        if not size:
            sizes[id(node)] = None
            below = node.value if isinstance(node, yaml.SequenceNode) else []
            if isinstance(node, yaml.MappingNode):
                below = [member for pair in node.value for member in pair]
            sizes[id(node)] = size = 1 + sum(map(count, below))
        return size

    return 0 if node is None else count(node)


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys and values of a configuration file.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    try:
        # reading a pipe would block, and a device may have no end
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is not a file, and a configuration is one")
        if path.stat().st_size > LARGEST:
            raise ConfigError(f"{path} has more than {LARGEST:,} bytes, and is no configuration")
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"no configuration at {path}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not readable YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no configuration: its top level must be keys and values")
    return values
