"""Sections of settings: each stands with the component that it sets, and a configuration is made of them."""

import math
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from flowalign.errors import ConfigError, nearest


class Section(BaseModel):
    """A part of a configuration; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


def parse(section: type[BaseModel], values: object, where: str = "") -> Any:
    """Validate values as a section, turning pydantic's report into one line for people."""
    half = _place(values, where, lambda value: isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value))
    if half is not None:
        raise ConfigError(f"{half}: holds half of a surrogate pair, which is no character")
    try:
        return section.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in ([where] if where else []) + list(first["loc"]))
        if first["type"] == "extra_forbidden":
            key = str(first["loc"][-1])
            known = _fields(section, [p for p in first["loc"][:-1] if isinstance(p, str)])
            moved = getattr(section, "moved", {}).get(key)
            elsewhere = [place for place in _places(section, key) if place != path]
            named = [place if "." in place else f"{place}, at the top level" for place in elsewhere]
            near = nearest(key, known) if not elsewhere else f"did you mean {' or '.join(named)}?"
            hint = f"it stands in {moved}" if moved else near
            raise ConfigError(f"{path}: unknown key '{key}'; {hint}") from error
        if first["type"] == "missing":
            raise ConfigError(f"{path}: this key is required") from error
        raise ConfigError(f"{path}: {first['msg']} (got {shortened(first['input'])})") from error


def shortened(value: object) -> str:
    """A value as a message shows it."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def not_finite(values: object) -> str | None:
    """The place of a number among nested settings that is infinite or none."""
    return _place(values, "", lambda value: isinstance(value, float) and not math.isfinite(value))


def _place(values: object, where: str, wrong: Callable[[Any], bool]) -> str | None:
    """The place of the first wrong value or key among nested settings."""
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(values, dict):
        if any(map(wrong, values)):
            return where or "a key"
        pairs = values.items()
    elif isinstance(values, list | tuple):
        pairs = enumerate(values)
    elif wrong(values):
        return where
    places = (_place(value, f"{where}.{key}" if where else str(key), wrong) for key, value in pairs)
    return next((place for place in places if place is not None), None)


def _places(section: type[BaseModel], key: str, above: str = "") -> list[str]:
    """Where among the sections below there is a key of this name."""
    found = []
    for name, field in section.model_fields.items():
        if name == key:
            found.append(above + name)
        of_list = typing.get_origin(field.annotation) is list
        for option in () if of_list else (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(option, type) and issubclass(option, Section):
                found += _places(option, key, f"{above}{name}.")
    return found


def _fields(section: type[BaseModel], path: Sequence[str]) -> list[str]:
    """Field names of the (sub)section that a path of keys leads to."""
    for key in path:
        annotation = section.model_fields[key].annotation
        options = [annotation, *typing.get_args(annotation)]
        section = next(o for o in options if isinstance(o, type) and issubclass(o, BaseModel))
    return list(section.model_fields)
