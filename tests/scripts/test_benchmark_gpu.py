"""The GPU benchmark in a small size on a CPU: it does the published work, and its figures hang together."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.parametrize("model", ["sd35_medium", "flux_dev", "qwen_image", "wan_1_3b"])
def test_figures_in_a_small_size(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    spec = importlib.util.spec_from_file_location("benchmark_gpu", SCRIPTS / "benchmark_gpu.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    path = tmp_path / "figures.json"
    small = ["--tiny", "--device", "cpu", "--dtype", "float32", "--size", "32", "--steps", "3", "--batch-size", "2"]
    script.main([model, *small, "--merge-lora", "--repeats", "1", "--json", str(path)])
    figures = json.loads(path.read_text())
    # the published transition is ours, on the same network
    assert figures["log_prob_disagreement"] < 1e-4
    assert set(figures["seconds"]) == {"rollout", "rollout_published", "update", "update_published"}
    # forward and backward of two steps is more than forward of three; guidance by concatenation is counted
    assert 0 < figures["flops"]["rollout"] < figures["flops"]["update"] < 4 * figures["flops"]["rollout"]
    for name in ("rollout", "update"):
        seconds = figures["seconds"]
        assert figures["faster"][name] == pytest.approx(seconds[f"{name}_published"] / seconds[name])
        assert figures["mfu"][name] == pytest.approx(
            figures["flops"][name] / seconds[name] / figures["matmul_flops_per_second"]
        )
    assert figures["per_second"]["rollout"] == pytest.approx(2 / figures["seconds"]["rollout"])
    assert figures["per_second"]["update"] == pytest.approx(4 / figures["seconds"]["update"])
    assert ("videos/s" if model == "wan_1_3b" else "images/s") in capsys.readouterr().out


def test_without_a_gpu_it_says_what_works(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    monkeypatch.syspath_prepend(SCRIPTS)
    spec = importlib.util.spec_from_file_location("benchmark_gpu", SCRIPTS / "benchmark_gpu.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    with pytest.raises(SystemExit):
        script.main(["sd35_medium"])
    assert "--device cpu --tiny" in capsys.readouterr().err
