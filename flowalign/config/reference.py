"""Keys of a configuration with their types, defaults and meanings, for people and editors."""

import json
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from flowalign.config.diffusion import Config
from flowalign.config.language import TextConfig
from flowalign.errors import ConfigError, nearest


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key of a configuration."""

    path: str
    """Path of the setting: section.key."""
    kind: str
    """Type of the value, for people."""
    default: Any
    """Default value; PydanticUndefined where it is required."""
    meaning: str

    @property
    def shown_default(self) -> str:
        """The default as it is written in YAML."""
        if self.default is PydanticUndefined:
            return "required"
        plain = self.default.model_dump() if isinstance(self.default, BaseModel) else self.default
        return json.dumps(plain)


def keys(text: bool = False) -> list[Key]:
    """All keys of a configuration for pictures, or for texts, in their order."""
    return list(_keys(TextConfig if text else Config, ""))


def _keys(section: type[BaseModel], above: str) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        inner = section_in(field.annotation)
        meaning = " ".join((field.description or "").split())
        default = field.get_default(call_default_factory=True)
        if inner is None:
            yield Key(path=f"{above}{name}", kind=shown(field.annotation), default=default, meaning=meaning)
            continue
        optional = NoneType in typing.get_args(field.annotation)
        if optional:
            meaning = meaning or " ".join((inner.__doc__ or "").split())
            yield Key(
                path=f"{above}{name}",
                kind="section or null",
                default=None if default is None else "as below",
                meaning=meaning,
            )
        named = typing.get_origin(field.annotation) is dict
        if named:
            yield Key(path=f"{above}{name}", kind="section by name", default=default, meaning=meaning)
        yield from _keys(inner, f"{above}{name}.NAME." if named else f"{above}{name}.")


def section_in(annotation: object) -> type[BaseModel] | None:
    """The section that a key holds, itself or null; None for a value."""
    from flowalign.settings import Section

    options = [annotation, *typing.get_args(annotation)] if typing.get_origin(annotation) is not list else []
    return next((o for o in options if isinstance(o, type) and issubclass(o, Section)), None)


def shown(annotation: object) -> str:
    """A type in short words."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " or ".join(map(str, inner))
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if member is type(None) else shown(member) for member in inner)
    if origin is not None and origin is not typing.Annotated:
        return f"{origin.__name__} of {' to '.join(shown(member) for member in inner)}" if inner else origin.__name__
    if origin is typing.Annotated:
        return shown(inner[0])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "name and settings" if "name" in annotation.model_fields else "section"
    names = {"str": "text", "int": "integer", "float": "number", "bool": "true or false", "Any": "any value"}
    return names.get(getattr(annotation, "__name__", ""), str(annotation))


def table(section: str | None = None, text: bool = False) -> list[Key]:
    """The keys of a section, or all.

    Raises:
        ConfigError: there is no such section or key.
    """
    all_keys = keys(text)
    if section is None:
        return all_keys
    selected = [key for key in all_keys if key.path == section or key.path.startswith(f"{section}.")]
    if not selected:
        names = {".".join(key.path.split(".")[:n]) for key in all_keys for n in (1, 2, 3)}
        raise ConfigError(f"no section or key '{section}'; {nearest(section, names)}")
    return selected


def schema() -> dict[str, Any]:
    """JSON schema of a configuration, by which editors complete and check YAML."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "flowalign configuration",
        "anyOf": [_open(Config, 0), _open(TextConfig, 1)],
    }


def _open(kind: type[BaseModel], number: int) -> dict[str, Any]:
    """Schema of a configuration without required keys: a recipe leaves out keys of the file that it extends."""
    json_schema = kind.model_json_schema(ref_template=f"#/anyOf/{number}/$defs/{{model}}")
    below = "a file, or the name of a shipped recipe, whose keys these go on top of"
    json_schema["properties"] |= {"extends": {"type": "string", "description": below}}
    json_schema.pop("required", None)
    return json_schema


INTRODUCTION = """# Configuration

Every key of a training configuration, made by `flowalign config --markdown` from the code. `flowalign config rollout`
shows a section on the screen. `flowalign config --schema > flowalign.schema.json` writes a JSON schema by which editors
complete and check YAML: `# yaml-language-server: $schema=flowalign.schema.json` in the file's first line. Settings of
algorithms, rewards, kernels and plans stand beside their `name`; `flowalign list rewards clip_score` shows one's.
`flowalign recipes` lists complete configurations.
"""


def markdown() -> str:
    """docs/configuration.md."""
    lines = [INTRODUCTION]
    for title, text in (("Pictures and videos", False), ("Texts: what differs", True)):
        lines += [f"## {title}", "", "| key | value | default | meaning |", "| --- | --- | --- | --- |"]
        shared = keys() if text else []
        for key in keys(text):
            if key not in shared:
                cells = (f"`{key.path}`", key.kind, f"`{key.shown_default}`", key.meaning)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)
