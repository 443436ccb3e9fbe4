"""How a configuration is read from YAML."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowalign.config.diffusion import Config
from flowalign.config.language import TextConfig
from flowalign.config.sections import BaseConfig
from flowalign.errors import ConfigError
from flowalign.runs.reading import parse_yaml, read_yaml
from flowalign.settings import parse

MOST_FILES = 50
"""Files that a configuration may extend, one through the other."""


def world_size() -> int:
    """Number of processes of this launch."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def recipe(name: str) -> Path:
    """The file of a recipe that comes with flowalign, e.g. 'tiny_sd3/flow_grpo'."""
    package = Path(__file__).parents[1]
    # a wheel has configs/ inside the package, a checkout has it next to the package
    folders = [folder for folder in (package / "configs", package.parent / "configs") if folder.is_dir()]
    return folders[0] / f"{name}.yaml"


def recipes() -> dict[str, str]:
    """The recipes that come with flowalign, by name, each with the first line of its comment."""
    folder = recipe("").parent
    files = [file for file in sorted(folder.glob("*/*.yaml")) if file.parent.name != "accelerate"]
    first = {file: file.read_text(encoding="utf-8").partition("\n")[0] for file in files}
    return {f"{file.parent.name}/{file.stem}": line.lstrip("# ") for file, line in first.items()}


def read(path: Path, above: Sequence[Path] = ()) -> dict[str, Any]:
    """The keys and values of a YAML file, merged into the file, or the shipped recipe, that it `extends`.

    Args:
        above: the files that led to this one.

    Raises:
        ConfigError: a file cannot be read, or extends itself.
    """
    if path.resolve() in above:
        chain = " -> ".join(file.name for file in [*above, path])
        raise ConfigError(f"{above[0]} extends itself: {chain}")
    if len(above) == MOST_FILES:
        raise ConfigError(f"{above[0]} extends a chain of more than {MOST_FILES} files")
    values = read_yaml(path)
    base = values.pop("extends", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise ConfigError(f"{path}: extends: the name of a file is wanted (got {base!r})")
    beside = path.parent / base
    file = beside if beside.exists() or not recipe(base).is_file() else recipe(base)
    return merge(read(file, [*above, path.resolve()]), values)


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merge sections key by key; an empty section, or one with a `name`, replaces the other one as a whole."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = merge(base[key], value) if both and value and "name" not in value else value
    return merged


def kind_of(values: Mapping[str, Any]) -> type[BaseConfig]:
    """`TextConfig` where these keys and values have model.kind 'text', else `Config`."""
    model = values.get("model")
    return TextConfig if isinstance(model, dict) and model.get("kind") == "text" else Config


def load(path: str | Path, overrides: Sequence[str] = ()) -> Any:
    """Read a YAML configuration and apply `section.key=value` overrides.

    Args:
        path: a file, or the name of a recipe that comes with flowalign ('tiny_sd3/demo').

    Raises:
        ConfigError: names the file, the key, and the nearest valid one.
    """
    path = Path(path) if Path(path).exists() or not recipe(str(path)).is_file() else recipe(str(path))
    # commands of the documentation name the files of a clone
    shipped = "/".join(path.with_suffix("").parts[-2:])
    if not path.exists() and shipped in recipes():
        raise ConfigError(f"no configuration at {path}; the recipe that comes with flowalign is called {shipped}")
    values = read(path)
    for override in overrides:
        _override(values, override)
    config = parse(kind_of(values), values)
    if config.name is None:
        # the name must not depend on the current folder, or on how the path was written
        folder = Path(os.path.abspath(path)).parent.name
        config.name = "-".join(filter(None, (folder, path.stem, f"seed{config.training.seed}")))
    return config


def _override(values: dict[str, Any], override: str) -> None:
    """Set one value, given as `section.key=value`."""
    key, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"'{override}' is not of the form section.key=value")
    *parents, last = key.split(".")
    section: Any = values
    for parent in parents:
        section = (
            section[_number(section, parent, key)] if isinstance(section, list) else section.setdefault(parent, {})
        )
        if not isinstance(section, dict | list):
            raise ConfigError(f"{key}: '{parent}' is not a section")
    try:
        value = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{key}: '{text[:80]}' is not readable YAML: {error}") from error
    section[_number(section, last, key) if isinstance(section, list) else last] = value


def _number(entries: list[Any], word: str, key: str) -> int:
    """Index in a list, from 0, given as one word of a key."""
    if not word.isdecimal() or int(word) >= len(entries):
        raise ConfigError(f"{key}: '{word}' is no entry of a list of {len(entries)}; count from 0")
    return int(word)
