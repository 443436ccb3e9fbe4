"""The script trains a recipe for one and two iterations, judges both, and tells which differences count."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("compare_lengths")


def test_both_lengths_are_trained_once(script: ModuleType, tmp_path: Path) -> None:
    # a recipe that keeps the best weights, which takes evaluations that the script leaves out
    app = typer.Typer()
    app.command()(script.main)
    small = ["training.iterations=1", "training.prompts_per_iteration=1", "training.group_size=2"]
    small += ["training.updates_per_iteration=1", "evaluation.where={category: [counting, three]}"]
    given = [str(ROOT / "configs/tiny_sd3/long_flow_grpo.yaml"), "--times", "2", "--seeds", "1", "--pictures", "1"]
    given += ["--output", str(tmp_path), *(word for setting in small for word in ("--set", setting))]
    first = CliRunner().invoke(app, given)
    assert first.exit_code == 0, first.output
    runs = {name: tmp_path / f"long_flow_grpo-{name}-seed0" for name in ("x1", "x2")}
    lengths = {name: len((run / "metrics.jsonl").read_text().splitlines()) for name, run in runs.items()}
    assert lengths["x2"] > lengths["x1"] > 0
    strict = {name: json.loads((run / "lengths.json").read_text())["strict"] for name, run in runs.items()}
    assert f"| `long_flow_grpo` | {100 * strict['x1']:.1f} | {100 * strict['x2']:.1f} |" in first.output
    # a second call reads what is there
    runs["x2"].joinpath("lengths.json").write_text('{"strict": 2.0}')
    assert "| 200.0 |" in CliRunner().invoke(app, given).output


@pytest.mark.parametrize(
    ("once", "longer", "told"),
    [
        ([0.5, 0.6], [0.52, 0.58], "within the spread"),
        ([0.5, 0.6], [0.7, 0.7], "higher"),
        ([0.5, 0.5], [0.4, 0.5], "within the spread"),
        ([0.5, 0.5], [0.4, 0.41], "lower"),
    ],
)
def test_what_a_line_tells(script: ModuleType, once: list[float], longer: list[float], told: str) -> None:
    assert script.line(Path("a.yaml"), 4, once, longer).endswith(f"| {told} |")
