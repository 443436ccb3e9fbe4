"""The table of mismatches says what a replay of the shipped model gives."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from packaging.version import Version

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure_mismatch.py"


def test_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    spec = importlib.util.spec_from_file_location("measure_mismatch", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path = tmp_path / "figures.json"
    module.main(["tiny_sd3", "--steps", "3", "--samples", "8", "--device", "cpu", "--json", str(path)])
    figures = json.loads(path.read_text())["tiny_sd3"]
    assert all(len(steps) == 2 for steps in figures.values())
    assert max(figures["float32"]) < 1e-6 < max(figures["bfloat16"])
    # under autocast an earlier torch multiplies the rows of small batches alike
    assert max(figures["autocast"]) < max(figures["bfloat16"])
    assert max(figures["autocast"]) > 1e-6 or Version(torch.__version__) < Version("2.15")
    assert not any(value for name, steps in figures.items() if "replayed" in name for value in steps)
    assert f"| tiny_sd3 | {max(figures['float32']):.1e} |" in capsys.readouterr().out
