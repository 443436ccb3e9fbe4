"""What a fresh interpreter loads, and the environment it loads torch in."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from flowalign.config import recipe

HEAVY = "print(*[name for name in ('torch', 'diffusers', 'transformers') if name in sys.modules])"
LIGHT = HEAVY.replace("'torch'", "'torch', 'numpy', 'yaml'")
COMMAND = """
import sys
from pathlib import Path
from flowalign.app.cli.main import main
try:
    main(sys.argv[1:])
finally:
    """


def last_line(code: str, *arguments: str, **environment: str) -> str:
    """The last line that a program prints; it may leave with an exit code."""
    ours = ("OMP_WAIT_POLICY", "ORT_DISABLE_TELEMETRY")
    own = {name: value for name, value in os.environ.items() if name not in ours}
    run = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=own | environment, timeout=300
    )
    assert "Traceback" not in run.stderr
    return run.stdout.splitlines()[-1]


@pytest.mark.parametrize("package", ["samplers", "rewards"])
def test_samplers_and_rewards_load_torch_alone(package: str) -> None:
    assert last_line(f"import sys, {package}; {HEAVY}") == "torch"


def test_the_core_loads_torch_alone() -> None:
    modules = [path.stem for path in (Path(__file__).parents[2] / "flowalign" / "core").glob("[a-z]*.py")]
    assert len(modules) > 5
    assert last_line(f"import sys; from flowalign.core import {', '.join(modules)}; {HEAVY}") == "torch"


@pytest.mark.parametrize(
    "arguments",
    [
        ["list"],
        ["trian"],
        ["train", str(recipe("tiny_sd3/flow_grpo")), "training.iteratoins=3"],
        ["train", "nowhere.yaml"],
    ],
    ids=["list", "misspelt command", "misspelt key", "missing file"],
)
def test_answers_without_a_model_load_no_torch(arguments: list[str]) -> None:
    assert last_line(COMMAND + HEAVY, *arguments) == ""


def test_a_model_loads_from_python_without_alarms_of_other_libraries() -> None:
    code = "import flowalign as fa; fa.load('tiny_sd3')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    lines = [line for line in done.stderr.splitlines() if "nanobind" not in line and "leaked" not in line]
    assert [line for line in lines if "Loading" not in line and line.strip("\x1b[A \r")] == []


def test_a_reward_server_loads_torch_alone(tmp_path: Path) -> None:
    """Beside what its rewards load: other libraries would take half as much memory again."""
    (tmp_path / "rewards.yaml").write_text("rewards: [{name: shapes}]\n")
    # refused without a token, once everything is imported
    words = ["reward-server", str(tmp_path / "rewards.yaml"), "--host", "0.0.0.0"]
    assert last_line(COMMAND + HEAVY, *words) == "torch"


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_what_needs_no_configuration_loads_no_library_for_it(option: str) -> None:
    assert last_line(COMMAND + LIGHT, option) == ""


@pytest.mark.parametrize("module", ["flowalign", "flowalign.app.cli.main", "flowalign.__main__"])
def test_waiting_threads_sleep_unless_the_user_says_otherwise(module: str) -> None:
    shown = f"import os, {module}; print(os.environ['OMP_WAIT_POLICY'])"
    assert last_line(shown) == "PASSIVE"
    assert last_line(shown, OMP_WAIT_POLICY="ACTIVE") == "ACTIVE"


@pytest.mark.skipif(find_spec("onnxruntime") is None, reason="onnxruntime is not installed")
@pytest.mark.parametrize("package", ["flowalign", "rewards"])
def test_onnxruntime_tells_its_makers_nothing(package: str, tmp_path: Path) -> None:
    """By default it keeps an identifier and what it will send in the user's cache."""
    last_line(f"import {package}, onnxruntime; print()", HOME=str(tmp_path))
    assert list(tmp_path.iterdir()) == []
