"""The best of n is that of all ways to choose n samples; drawings pass as drawn."""

import importlib
from itertools import combinations
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("measure_ceiling")


@pytest.mark.parametrize("right", [0, 1, 3, 6])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_the_best_of_n_is_the_mean_over_all_choices(script: ModuleType, n: int, right: int) -> None:
    samples = [1] * right + [0] * (6 - right)
    chosen = [max(few) for few in combinations(samples, n)]
    assert script.pass_at(n, 6, right) == pytest.approx(sum(chosen) / len(chosen))


def test_it_prints_both_ceilings(script: ModuleType, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(script.main)
    given = [str(ROOT / "configs/tiny_sd3/demo.yaml"), f"output={tmp_path}", "--pictures", "2"]
    printed = CliRunner().invoke(app, given)
    assert printed.exit_code == 0, printed.output
    shares = [float(line.split("|")[2].strip(" %")) for line in printed.output.splitlines() if line[2:3].isdigit()]
    assert len(shares) == 2 and 20 < shares[0] < shares[1] < 100
    assert "as drawn: 100.0%" in printed.output and "by the VAE: " in printed.output
