"""The table of mismatches says what a replay of the shipped model gives."""

import importlib.util
import json
from pathlib import Path

import pytest

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
    # above 0 only where the processor's bfloat16 products depend on the batch
    assert max(figures["autocast"]) < max(figures["bfloat16"])
    assert not any(value for name, steps in figures.items() if "replayed" in name for value in steps)
    assert f"| tiny_sd3 | {max(figures['float32']):.1e} |" in capsys.readouterr().out
    # of the samples themselves, on any processor: autocast is on
    half, full = (
        module.load("tiny_sd3", dtype, "cpu").sample(["rain"], [0], steps=3) for dtype in ("autocast", "float32")
    )
    assert 1e-4 < (half.trajectory.final - full.trajectory.final).abs().max() < 0.1
