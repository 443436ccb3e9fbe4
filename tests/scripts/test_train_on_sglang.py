"""The script that trains on a real sglang, as far as it goes without one: its commands, and what it refuses."""

import importlib.util
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flowalign.config import load

SCRIPTS = Path(__file__).parents[2] / "scripts"
TINY = ["--config", str(SCRIPTS.parent / "configs/tiny_sd3/flow_grpo.yaml"), "rollout.sigmas=null"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_on_sglang", SCRIPTS / "train_on_sglang.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_commands_are_shown_and_accepted(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    script.main(["--print", *TINY, "--port", "30123", "--iterations", "2"])
    serve, train = map(shlex.split, capsys.readouterr().out.splitlines())
    assert serve[:4] == ["sglang", "serve", "--model-path", "tiny_sd3"] and serve[-2:] == ["--dit-precision", "fp32"]
    config = load(Path(train[4]), train[5:])
    config.check(1)
    assert config.rollout.engine.served("pictures")[1].url == ["http://127.0.0.1:30123"]
    assert config.training.iterations == 2


def test_what_is_missing_is_said_in_a_line(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            script.main(TINY)
        assert "torch finds no CUDA device here; --print shows" in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(SystemExit):
        script.main(["--device", "cpu", *TINY, "--sglang", str(tmp_path / "sglang")])
    assert "pip install 'sglang[diffusion]==0.5.23', then --sglang" in capsys.readouterr().err.splitlines()[-1]
    for name, text in (("sglang", "#!/bin/sh\n"), ("python", "#!/bin/sh\necho 0.5.22\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    assert "is version 0.5.22; python3 -m venv" in script.unfit(str(tmp_path / "sglang"))


def test_a_server_that_ends_is_told_with_its_last_words(script: ModuleType, tmp_path: Path) -> None:
    arguments = script.argparse.Namespace(output=tmp_path, port=1, patience=60)
    words = [sys.executable, "-c", "import sys; sys.exit('no\\nmemory')"]
    with (
        pytest.raises(SystemExit, match="the server ended with code 1: no memory"),
        script.serving(arguments, words, {}),
    ):
        pass
