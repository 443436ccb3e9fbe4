"""What the site adds to the pages: the command line's own help, and files of the project shown by name, not linked."""

import re
from typing import Any

import typer

from flowalign.app.cli.main import app

OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./([^)#]+)[^)]*\)")
"""A link to a file that is not a page of the site."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The text of a page, before it becomes HTML."""
    if page.file.src_path == "cli.md":
        markdown += described("", typer.main.get_command(app))
    if "/" in page.file.src_path:
        # of the pages in folders, which link to other pages alone
        return markdown
    return OUTSIDE.sub(lambda link: link[1] if link[1].startswith("`") else f"{link[1]} (`{link[2]}`)", markdown)


def described(name: str, command: Any) -> str:
    """A command as Markdown: what it does, its arguments and options; of a group those of all its commands."""
    if hasattr(command, "commands"):
        return "".join(described(f"{name} {one}".strip(), inner) for one, inner in sorted(command.commands.items()))
    rows = ["| | |", "| --- | --- |"]
    for parameter in command.params:
        if parameter.name == "help":
            continue
        label = (
            parameter.metavar or parameter.name
            if parameter.param_type_name == "argument"
            else ", ".join(parameter.opts)
        )
        text = (getattr(parameter, "help", None) or "").replace("|", "\\|")
        rows.append(f"| `{label}` | {text} |")
    return f"\n\n## flowalign {name}\n\n{command.help or ''}\n\n" + "\n".join(rows)
