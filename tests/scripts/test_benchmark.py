"""The benchmark runs, its figures hang together, and it says what is wrong with its arguments."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from flowalign.data import ASSETS

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark.py"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch):
    """The script's main, on the CPU with one repeat."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    spec = importlib.util.spec_from_file_location("benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    threads = torch.get_num_threads()
    yield lambda *arguments: module.main(["--device", "cpu", "--repeats", "1", *arguments])
    torch.set_num_threads(threads)


def test_figures_of_the_shipped_model(benchmark, capsys, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    benchmark("--batch-size", "8", "--steps", "3", "--guidance", "2", "--threads", "1", "--json", str(path))
    figures = json.loads(path.read_text())
    printed = capsys.readouterr().out

    assert figures["settings"]["batch_size"] == 8 and figures["settings"]["threads"] == 1
    # guidance by concatenation is one call a step; two of the three steps are learned from
    assert figures["network_calls"] == {"rollout": 3, "update": 2}
    assert set(figures["seconds"]) == {"rollout", "decode", "reward", "update"}
    assert figures["peak_memory_gib"]["process"] > 0.05
    bare, seconds, efficiency = figures["bare_seconds"], figures["seconds"], figures["efficiency"]
    assert min(bare.values()) > 0 and min(seconds.values()) > 0
    assert efficiency["rollout"] == pytest.approx(3 * bare["forward"] / seconds["rollout"])
    assert efficiency["rollout_and_decode"] == pytest.approx(
        3 * bare["forward"] / (seconds["rollout"] + seconds["decode"])
    )
    assert efficiency["update"] == pytest.approx(2 * bare["forward_backward"] / seconds["update"])
    assert all(f"{value:.2f}" in printed for value in efficiency.values())


def test_random_weights_from_configurations_alone(benchmark, tmp_path: Path) -> None:
    for name in ("transformer", "vae", "scheduler"):
        (tmp_path / name).mkdir()
        for file in (ASSETS / "tiny_sd3" / name).glob("*.json"):
            (tmp_path / name / file.name).write_text(file.read_text())
    path = tmp_path / "figures.json"
    benchmark("--config", str(tmp_path), "--batch-size", "2", "--steps", "2", "--json", str(path))
    figures = json.loads(path.read_text())
    assert figures["settings"]["model"] == str(tmp_path)
    assert figures["parameters"] > 3e6


@pytest.mark.parametrize("option, value", [("--batch-size", "1"), ("--steps", "1"), ("--attention", "no_such")])
def test_bad_arguments_are_one_line_and_exit_code_2(benchmark, capsys, option: str, value: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        benchmark(option, value)
    assert stopped.value.code == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert "error:" in message and option.strip("-") in message


def test_a_step_on_texts_is_measured_beside_trls(benchmark, capsys, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    benchmark("--text", "--batch-size", "16", "--repeats", "2", "--threads", "1", "--json", str(path))
    figures = json.loads(path.read_text())
    seconds = figures["seconds"]
    for part in ("step", "rollout", "update"):
        assert len(figures["turns"]["trl"][part]) == len(figures["turns"]["flowalign"][part]) == 2
        assert figures["ratio"][part] == pytest.approx(seconds["trl"][part] / seconds["flowalign"][part])
    for own in seconds.values():
        assert 0 < own["rollout"] < own["step"] and 0 < own["update"] < own["step"]
    assert "TRL / flowalign" in capsys.readouterr().out


def test_without_trl_it_says_how_to_get_it(benchmark, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        benchmark("--text")
    assert "pip install 'flowalign[bench]'" in capsys.readouterr().err
