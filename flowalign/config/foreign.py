"""Check of a folder that somebody else may have made: does its configuration reach outside of it?"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from flowalign.config.loader import read, recipe
from flowalign.data import ASSETS, PromptList, Prompts
from flowalign.errors import ConfigError, hide
from flowalign.runs.foreign import check_folder
from flowalign.runs.reading import read_yaml

WRITTEN = ("embeddings", "cache")
"""Settings that name a folder to write to."""
UNUSED = ("rollout.engine",)
"""Settings that nothing but a run itself uses."""


def check_run(run: Path, used: Iterable[str]) -> None:
    """Refuse a run's folder that would reach outside, by links or by addresses and paths in its configuration.

    Args:
        used: sections of the configuration that the caller uses.

    Raises:
        ConfigError: lists the addresses, the environment variables and the files that would be used.
    """
    check_folder(run)
    file = run / "config.yaml"
    base = read_yaml(file).get("extends")
    # flowalign's own recipes are trusted
    if isinstance(base, str) and not _within(file.parent / base, [recipe("").parent]):
        raise ConfigError(f"{file} extends the file {base}; --trust allows it")
    values = read(file)
    allowed = [run, Path.cwd()]
    reached = list(_reached({name: values[name] for name in used if name in values}, "", allowed))
    if reached:
        raise ConfigError(f"{file} would use {'; '.join(reached)}; --trust allows it")


def check_prompts(prompts: PromptList, run: Path) -> None:
    """Refuse the held-out prompts of a run where they name files outside its folder and the current one."""
    for record in Prompts.of(prompts).metadata:
        reached = list(_reached(record, "", [run, Path.cwd(), ASSETS]))
        if reached:
            raise ConfigError(f"the prompts of {run / 'config.yaml'} name {reached[0]}; --trust allows it")


def _reached(values: object, key_path: str, allowed: Sequence[Path]) -> Iterator[str]:
    """Each setting that is an address, the name of an environment variable, or a path outside."""
    if key_path in UNUSED:
        return
    if isinstance(values, Mapping):
        for key, value in values.items():
            # a key may be a path too: LoRAs by folder, with their weights as values
            if isinstance(key, str) and _outside(key, allowed):
                yield f"{key_path} the path {key}"
            yield from _reached(value, f"{key_path}.{key}" if key_path else str(key), allowed)
    elif isinstance(values, list | tuple):
        for number, value in enumerate(values):
            yield from _reached(value, f"{key_path}.{number}", allowed)
    elif isinstance(values, str):
        key = key_path.rpartition(".")[2]
        if key.endswith("variable"):
            yield f"{key_path}: the environment's {values[:80]}"
        elif re.match(r"[A-Za-z][A-Za-z0-9+.-]*://\S+$", values.strip()):
            yield f"{key_path}: the address {hide(values)[:200]}"
        elif key in WRITTEN:
            yield f"{key_path}: the place {values[:200]} to write to"
        elif _outside(values, allowed):
            yield f"{key_path}: the path {values[:200]}"


def _outside(text: str, allowed: Sequence[Path]) -> bool:
    """True if a text names an existing file or folder outside of the allowed folders."""
    try:
        path = Path(text).expanduser()
        return len(text) < 4096 and os.path.lexists(path) and not _within(path, allowed)
    except (OSError, ValueError, RuntimeError):
        return False


def _within(path: Path, folders: Sequence[Path]) -> bool:
    return any(path.resolve().is_relative_to(folder.resolve()) for folder in folders)
