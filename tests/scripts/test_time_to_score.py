"""Time to a score: flow_grpo's own loop has our transitions and its first ratios are 1; times are read off a line."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from samplers import flow_sde
from samplers.kernels import transition

SCRIPT = Path(__file__).parents[2] / "scripts" / "time_to_score.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("time_to_score", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("step", [0, 1, 3])
def test_their_transition_is_flow_sde(script: ModuleType, step: int) -> None:
    x, velocity, following = (torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(k)) for k in range(3))
    made = script.Published.transition(None, x, velocity, step, following)[1]
    at, to, eta = (torch.as_tensor(value).expand(2) for value in (*script.SIGMAS[step : step + 2], script.ETA))
    expected = transition(flow_sde, x=x, v=velocity, sigma=at, sigma_next=to, eta=eta, next=following).log_prob
    torch.testing.assert_close(made, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_race(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    small = [
        "--seeds",
        "100",
        "--most",
        "0.1",
        "0.1",
        "--every",
        "0.1",
        "--pictures",
        "1",
        "--prompts",
        "2",
        "--batches",
        "2",
    ]
    own = ["--set", "training.prompts_per_iteration=2", "--set", "training.updates_per_iteration=1"]
    script.main([*small, *own, "--json", str(path)])
    [seed] = json.loads(path.read_text())["seeds"]
    for name in ("published", "flowalign"):
        (start, base), (end, _) = seed[name]["curve"]
        assert start == 0 and base == seed["base"] and end >= 0.1 and seed[name]["iterations"] >= 1
    assert "published: " in capsys.readouterr().out


def test_the_time_is_read_off_a_line(script: ModuleType) -> None:
    way = script.Way(None, None, 60.0, curve=[(0.0, 50.0), (10.0, 52.0), (20.0, 60.0), (30.0, 50.0)])
    assert way.reached(56.0) == 15.0 and way.reached(61.0) is None
