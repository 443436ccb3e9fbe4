"""docs/notebook.ipynb: its cells run, one after the other in one process, and are kept without what they printed."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebook.ipynb"
SMALLER = '"training.prompts_per_iteration=2", "training.group_size=4", "training.previews=0", "evaluation.limit=6"'


def test_its_cells_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    shown = [run(cell["source"], names) for cell in cells]
    assert [type(value).__name__ for value in shown if value is not None] == [
        *("Rollout", "Grid", "Figure", "Run", "Figure", "Grid", "dict", "PosixPath")
    ]
    # of the pictures a notebook shows these
    assert shown[1]._repr_html_().count("<img") == 6 and shown[2]._repr_html_().count("<img") == 6
    assert len(names["run"].metrics) == 1 and (tmp_path / "runs/notebook/gallery/index.html").is_file()


def run(source: list[str], names: dict[str, Any]) -> Any:
    """What a cell shows: the value of its last line, if it has one."""
    text = re.sub(r"ITERATIONS = \d+", "ITERATIONS = 1", "".join(source)).replace('"evaluation.limit=40"', SMALLER)
    *lines, last = ast.parse(text).body
    if not isinstance(last, ast.Expr):
        exec(text, names)
        return None
    exec(compile(ast.Module(lines, []), NOTEBOOK.name, "exec"), names)
    return eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), names)
