"""scripts/measure_credit_signal.py: its figures on gradients whose signal is known."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure_credit_signal.py"
SPEC = importlib.util.spec_from_file_location("measure_credit_signal", SCRIPT)
script = sys.modules["measure_credit_signal"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(script)


def test_figures_are_those_of_the_distribution_that_gradients_are_drawn_from() -> None:
    """Of means of length 1 whose cosine is 0.6, in 1,000 dimensions with noise of squared length 3 and 1."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.zeros(2, 1000)
    mean[0, 0], mean[1, 0], mean[1, 1] = 1.0, 0.6, 0.8
    noise = torch.randn(2, 400, 1000, generator=generator) / 1000**0.5
    first, own = mean[0] + 3**0.5 * noise[0], mean[1] + noise[1]
    assert script.signal(first).item() == pytest.approx(1 / 4, abs=0.01)
    assert script.per_sample(own, first).item() == pytest.approx(3, abs=0.2)
    assert script.direction(own, first).item() == pytest.approx(0.6, abs=0.02)


def test_a_batch_is_not_compared_with_itself() -> None:
    """So that few batches have no bias: nothing in common is no signal, and one gradient for all is signal alone."""
    assert script.signal(torch.eye(4)).item() == 0
    assert script.signal(torch.ones(3, 2)).item() == 1


def test_a_standard_error_is_that_of_the_mean() -> None:
    values = torch.randn(50, 1, generator=torch.Generator().manual_seed(1))
    error = values.std().item() / 50**0.5
    assert script.told(lambda own: own.mean(), values) == f"{values.mean().item():.3f} ± {error:.3f}"


def test_credit_of_one_noisy_step_is_that_of_the_trajectory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The demo's recipe has noise in one step, so that what it gained is what the sample did."""
    small = ["training.prompts_per_iteration=6", "training.group_size=4"]
    script.main(["flow_grpo", "dense_grpo"], batches=3, changed=small, output=tmp_path / "gradients.safetensors")
    assert len(load_file(tmp_path / "gradients.safetensors")["dense_grpo"]) == 3
    lines = capsys.readouterr().out.splitlines()
    flow, dense = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[-2:])
    assert flow[2] == dense[2] and dense[3] == "1.000 ± 0.000" and int(dense[1]) > int(flow[1])
