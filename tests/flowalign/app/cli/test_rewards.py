"""`reward-server` and `reward-check` as commands."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import numpy as np
import pytest
import torch
import typer
from PIL import Image
from typer.testing import CliRunner

from flowalign.app.cli.reward_file import read
from flowalign.app.cli.rewards import reward_check, reward_server
from flowalign.config.rewards import build_reward
from flowalign.errors import ConfigError
from rewards.remote import RemoteReward
from rewards.shapes import draw, heldout_requests, sample_requests

ROOT = Path(__file__).parents[4]
SHAPES = "rewards:\n  - {name: shapes, weight: 2.0}\n"
app = typer.Typer()
app.command("reward-server")(reward_server)
app.command("reward-check")(reward_check)


@pytest.fixture
def config(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "rewards.yaml"
        path.write_text(text)
        return path

    return write


def test_check_of_the_shapes_checker(config):
    result = CliRunner().invoke(app, ["reward-check", str(config(SHAPES))])
    assert result.exit_code == 0 and "FAILED" not in result.output and "noise" in result.output


def test_check_of_a_bad_reward_leaves_with_1(config):
    result = CliRunner().invoke(app, ["reward-check", str(config("rewards: [{name: builtins.len}]"))])
    assert result.exit_code == 1


def test_training_configurations_are_read_for_their_rewards():
    settings = read(ROOT / "configs" / "tiny_sd3" / "flow_grpo.yaml")
    assert settings.rewards[0].name == "shapes" and settings.server.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rewards: [{name: shapes}]\nserver: {prot: 1}", "unknown key 'prot'; did you mean 'port'"),
        ("rewards: []", "rewards"),
        ("rewards: [", "not readable YAML"),
        ("- shapes", "top level must be keys"),
        ("rewards: [{name: shapes}]\nserver: {token_variable: NO_TOKEN}", "the environment has no 'NO_TOKEN'"),
    ],
)
def test_bad_configurations(config, text, message):
    with pytest.raises(ConfigError, match=message):
        reward_server(config(text))


@contextmanager
def serving(path: Path) -> Iterator[str]:
    """The command in a process of its own; its address, once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = (
        "import sys; from pathlib import Path; from flowalign.app.cli.rewards import reward_server; "
        "reward_server(Path(sys.argv[1]), None, int(sys.argv[2]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(path), str(port)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    try:
        for _ in range(3000):
            try:
                httpx2.get(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except httpx2.HTTPError:
                assert process.poll() is None
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def test_server_serves(config):
    with serving(config(SHAPES)) as url:
        version = httpx2.get(f"{url}/version").json()
    assert version["reward"] == "shapes" and "torch" in version["versions"]


@pytest.mark.slow
def test_a_served_judge_scores_as_in_process(config):
    """The tiny VLM at batch 32, in process and served."""
    model = ROOT / "flowalign" / "data" / "assets" / "tiny_vlm"
    judge = f"{{model: {model}, device: cpu, batch_size: 32}}"
    path = config(f"rewards: [{{name: vlm_judge, template: shapes_show, judge: {judge}}}]")
    here = build_reward(read(path).rewards)
    rng = np.random.default_rng(0)
    requests = sample_requests(heldout_requests(), 32, rng)
    images = [Image.fromarray(draw(request, rng)) for request in requests]
    batch = (images, [request.prompt for request in requests], [{} for _ in requests])
    with serving(path) as url:
        there = RemoteReward(url)
        values = {"here": here(*batch).value, "there": there(*batch).value}
    torch.testing.assert_close(values["there"], values["here"], rtol=0, atol=1e-6)


def test_a_configuration_that_extends_another_has_its_rewards(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(SHAPES)
    (tmp_path / "mine.yaml").write_text("extends: base.yaml\nmodel: {path: tiny_sd3}\n")
    assert [reward.name for reward in read(tmp_path / "mine.yaml").rewards] == ["shapes"]
