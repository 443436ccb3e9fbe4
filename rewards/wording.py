"""The words that models are told: ours, or their authors', read from their own Python files, which are not run."""

import ast
from collections.abc import Sequence
from pathlib import Path

WORDINGS = Path(__file__).parent / "wordings"
"""Folder of wordings for models whose authors gave none."""


def wording(title: str, files: Sequence[Path], names: Sequence[str], theirs: str, markers: Sequence[str]) -> str:
    """Wording for a model: the text of a file, or of constants in the authors' Python files, which are not run.

    Args:
        names: names of the constants that make it up.
        theirs: where the authors have them, for messages.
        markers: tokens that it must hold once each.

    Raises:
        ValueError: it lacks something; one line.
    """
    if files[0].suffix == ".py":
        constants = {name: text for file in files for name, text in named_texts(file).items()}
        if missing := [name for name in names if name not in constants]:
            raise ValueError(f"{title}: {files[0]} has no '{missing[0]}'; give {theirs}")
        text = "".join(constants[name] for name in names).replace("{text_prompt}", "{prompt}")
    else:
        text = files[0].read_text(encoding="utf-8")
    lacking = [marker for marker in markers if text.count(marker) != 1]
    if lacking or "{prompt}" not in text:
        raise ValueError(f"{title}: {files[0]} must hold {{prompt}}, and once {', '.join(markers)}")
    return text


def named_texts(file: Path) -> dict[str, str]:
    """All texts of a Python file: those with a name by it, the others by numbers.

    What stands in braces of an f-string stays in them, if it is a name.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    named: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and (text := _text(node)) is not None:
            named[f"text {len(named)}"] = text
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if (text := _text(value)) is not None:
                # the file's own come before those within its functions
                if node in tree.body or name not in named:
                    named[name] = text
    return named


def _text(node: ast.expr) -> str | None:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(piece) or "" for piece in parts)
        case ast.FormattedValue(value=ast.Name(id=name)):
            return f"{{{name}}}"
        case _:
            return None
