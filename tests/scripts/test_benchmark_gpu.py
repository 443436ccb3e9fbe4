"""The GPU benchmark runs in small on a CPU, its figures hang together, and both ways do the same work."""

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from samplers.kernels import flow_sde

SCRIPTS = Path(__file__).parents[2] / "scripts"
SETTINGS = {"tiny": True, "batch_size": 4, "micro_batch": 2, "steps": 3, "guidance": 4.5, "size": 64, "rank": 2}
SETTINGS |= {"dtype": "float32", "peer_weights": "float32", "gradient_checkpointing": False, "set": [], "repeats": 1}
CPU = torch.device("cpu")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    return importlib.import_module("benchmark_gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="prints figures of the CPU")
def test_the_whole_script_runs_in_small(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.main(["--tiny", "--json", str(tmp_path / "figures.json")])
    sd3, flux = json.loads((tmp_path / "figures.json").read_text())
    printed = capsys.readouterr().out
    assert "SD3.5-medium, tiny" in printed and "FLUX.1-dev, tiny" in printed
    assert ">= 1.3" in printed and ">= 1.5" in printed and "not measured" in printed
    assert not flux["settings"]["set"] and sd3["settings"]["batch_size"] == 4
    for figures in (sd3, flux):
        before, after = figures["published"], figures["flowalign"]
        for way in (before, after):
            seconds, rates = way["seconds"], way["per_second"]
            assert rates["rollout"] == pytest.approx(4 / seconds["rollout"])
            assert rates["update"] == pytest.approx(4 * 2 / seconds["update"])
            used = figures["flops"]["update"] / seconds["update"] / figures["matmul_flops_per_second"]
            assert 0 < way["model_flop_utilisation"]["update"] == pytest.approx(used)
        assert figures["faster"]["update"] == pytest.approx(
            after["per_second"]["update"] / before["per_second"]["update"]
        )
        assert f"{figures['faster']['rollout']:.2f}" in printed


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_both_ways_do_the_same_work(script: Any, name: str, tmp_path: Path) -> None:
    model, settings = script.MODELS[name], argparse.Namespace(**SETTINGS)
    peer = script.published(model, settings, CPU)
    before, after = script.published_parts(peer, settings), script.our_parts(model, settings, CPU, tmp_path)
    flops = {part: [script.flops(parts[part]) for parts in (before, after)] for part in before}
    assert flops["rollout"][0] == flops["rollout"][1] > 0
    assert flops["decode"][0] == flops["decode"][1] > 0
    assert flops["update"][0] == pytest.approx(flops["update"][1], rel=0.01)
    expected = script.counted(peer, settings)
    assert expected["rollout"] == flops["rollout"][0]
    assert expected["update"] == pytest.approx(flops["update"][0], rel=0.01)


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_the_published_way_is_flow_grpo(script: Any, name: str) -> None:
    peer = script.published(script.MODELS[name], argparse.Namespace(**SETTINGS), CPU)
    states, log_probs = peer.rollout()
    for step in (0, 1):
        x, v = states[:, step], torch.randn_like(states[:, step])
        sigma, after, eta = peer.sigmas[step], peer.sigmas[step + 1], torch.tensor(0.7)
        for ours, theirs in zip(flow_sde(x, v, sigma, after, eta), peer.transition(x, v, step), strict=True):
            torch.testing.assert_close(ours, theirs)
    peer.optimizer.param_groups[0]["lr"] = 0.1
    ratio = peer.update(states, log_probs, torch.ones(4), 2)
    assert ratio.shape == (2, 2) and (ratio - 1).abs().max() < 1e-5
    second = peer.update(states, log_probs, torch.ones(4), 2)
    assert (second - 1).abs().max() > 0  # the first one moved the weights


def test_the_real_configurations_have_the_published_sizes(script: Any) -> None:
    with torch.device("meta"):
        sizes = {
            name: sum(p.numel() for p in model.network(**model.transformer).parameters())
            for name, model in script.MODELS.items()
        }
    # FLUX.1-dev: the total that the hub shows; SD3.5-medium: 2.2 billion without its text encoders
    assert sizes["flux"] == 11_901_408_320 and round(sizes["sd3"] / 1e9, 1) == 2.2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_works(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main([])
    assert "--tiny" in capsys.readouterr().err


def test_out_of_memory_says_what_to_lower(script: Any) -> None:
    with (
        pytest.raises(SystemExit, match="flowalign ran out of memory; lower --micro-batch"),
        script.explained("flowalign"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
