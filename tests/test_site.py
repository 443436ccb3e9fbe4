"""The documentation as a site: its navigation has every page, and the command line's page every command."""

import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typer
import yaml

from flowalign.app.cli.main import app

ROOT = Path(__file__).parents[1]


def pages(entries: Any) -> Iterator[str]:
    for value in entries.values() if isinstance(entries, dict) else entries:
        yield from [value] if isinstance(value, str) else pages(value)


def test_every_page_stands_in_the_navigation_once() -> None:
    named = list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(named) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))


def test_the_page_of_the_command_line_has_every_command_with_its_options() -> None:
    convert = runpy.run_path(str(ROOT / "docs/site/hooks.py"))["on_page_markdown"]
    text = convert("# Command line", SimpleNamespace(file=SimpleNamespace(src_path="cli.md")))
    commands: Any = typer.main.get_command(app)
    assert all(f"## flowalign {name}" in text for name in commands.commands)
    assert "`--budget`" in text and "forwards=100000" in text
    link = convert(
        "see [base](../flowalign/app/api.py#L3) and [x](x.md)", SimpleNamespace(file=SimpleNamespace(src_path="a.md"))
    )
    assert link == "see base (`flowalign/app/api.py`) and [x](x.md)"
