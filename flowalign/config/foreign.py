"""What the configuration of a folder that somebody else may have made would reach outside it."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowalign.config.loader import read, recipe
from flowalign.data import ASSETS, Prompts
from flowalign.errors import ConfigError, hide
from flowalign.runs.foreign import check_folder
from flowalign.runs.reading import read_yaml

WRITTEN = ("embeddings", "cache")
"""Settings that name a folder to write to."""


def check_run(run: Path, used: Iterable[str]) -> None:
    """Refuse a run's folder that would reach outside: by links, or by what its configuration names.

    Args:
        used: sections of the configuration that are used.

    Raises:
        ConfigError: lists the addresses, the environment variables and the files that would be used.
    """
    check_folder(run)
    file = run / "config.yaml"
    base = read_yaml(file).get("extends")
    # a recipe of flowalign's own is no stranger's
    if isinstance(base, str) and not _within(file.parent / base, [recipe("").parent]):
        raise ConfigError(f"{file} extends the file {base}; --trust allows it")
    values = read(file)
    allowed = [run, Path.cwd()]
    found = list(_reached({name: values[name] for name in used if name in values}, "", allowed))
    if found:
        raise ConfigError(f"{file} would use {'; '.join(found)}; --trust allows it")


def check_prompts(listed: Any, run: Path) -> None:
    """Refuse the held-out prompts of a run where they name files outside its folder and the current one."""
    for record in Prompts.of(listed).metadata:
        found = list(_reached(record, "", [run, Path.cwd(), ASSETS]))
        if found:
            raise ConfigError(f"the prompts of {run / 'config.yaml'} name {found[0]}; --trust allows it")


def _reached(values: Any, place: str, allowed: Sequence[Path]) -> Iterator[str]:
    """Each setting that is an address, the name of an environment variable, or a path outside."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            # weights of LoRAs stand beside their folders
            if isinstance(key, str) and _outside(key, allowed):
                yield f"{place} the path {key}"
            yield from _reached(value, f"{place}.{key}" if place else str(key), allowed)
    elif isinstance(values, list | tuple):
        for number, value in enumerate(values):
            yield from _reached(value, f"{place}.{number}", allowed)
    elif isinstance(values, str):
        key = place.rpartition(".")[2]
        if key.endswith("variable"):
            yield f"{place}: the environment's {values[:80]}"
        elif re.match(r"[A-Za-z][A-Za-z0-9+.-]*://\S+$", values.strip()):
            yield f"{place}: the address {hide(values)[:200]}"
        elif key in WRITTEN:
            yield f"{place}: the place {values[:200]} to write to"
        elif _outside(values, allowed):
            yield f"{place}: the path {values[:200]}"


def _outside(text: str, allowed: Sequence[Path]) -> bool:
    """Whether a text names something that is there, outside of the allowed folders."""
    try:
        path = Path(text).expanduser()
        return len(text) < 4096 and os.path.lexists(path) and not _within(path, allowed)
    except (OSError, ValueError, RuntimeError):
        return False


def _within(path: Path, folders: Sequence[Path]) -> bool:
    return any(path.resolve().is_relative_to(folder.resolve()) for folder in folders)
