"""Training on a served reward while its server is killed: nothing is lost, and the result is the undisturbed one."""

import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flowalign.config import load
from flowalign.training import Trainer
from rewards import RewardError
from tests.flowalign.training.processes import FORKS, run_script

ROOT = Path(__file__).parents[3]
ITERATIONS = 3


class Server:
    """The shapes checker behind tests/rewards/served_reward.py, to be killed and started again."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.start()

    def start(self) -> None:
        script = ROOT / "tests" / "rewards" / "served_reward.py"
        self.process = FORKS.Process(target=run_script, args=(script, str(self.port)))
        self.process.start()

    def wait(self) -> None:
        """Until it listens."""
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.1)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture
def server():
    server = Server()
    yield server
    server.kill()


def train(folder: Path, reward: dict[str, Any], resume: bool = False, overlap: int = 1) -> dict[str, torch.Tensor]:
    """A short run's LoRA weights."""
    overrides = [
        f"training.iterations={ITERATIONS}",
        "training.prompts_per_iteration=2",
        "training.group_size=4",
        "training.checkpoint_every=1",
        "evaluation.prompts=null",
        f"rewards=[{reward}]",
        f"rollout.overlap={overlap}",
        f"output={folder}",
        "name=run",
    ]
    config = load(ROOT / "configs" / "tiny_sd3" / "flow_grpo.yaml", overrides)
    Trainer(config, resume=resume, progress=False).train()
    (weights,) = (folder / "run" / "lora").glob("*.safetensors")
    return load_file(weights)


def remote(server: Server, patience: float) -> dict[str, Any]:
    return {"name": "remote", "url": f"http://127.0.0.1:{server.port}", "timeout": 60, "patience": patience}


def lines(folder: Path) -> int:
    metrics = folder / "run" / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def killer(server: Server, folder: Path, restart: bool) -> threading.Thread:
    """Kills the server once an iteration is done."""

    def act() -> None:
        while not lines(folder):
            time.sleep(0.005)
        server.kill()
        if restart:
            time.sleep(1.0)
            server.start()

    thread = threading.Thread(target=act)
    thread.start()
    return thread


@pytest.fixture(scope="module", params=[1, 2])
def overlap(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, overlap: int) -> dict[str, torch.Tensor]:
    return train(tmp_path_factory.mktemp("here"), {"name": "shapes"}, overlap=overlap)


@pytest.mark.slow
def test_training_waits_for_a_killed_server_and_ends_the_same(tmp_path, server, overlap, undisturbed):
    thread = killer(server, tmp_path / "there", restart=True)
    disturbed = train(tmp_path / "there", remote(server, patience=120.0), overlap=overlap)
    thread.join()
    torch.testing.assert_close(disturbed, undisturbed, rtol=0, atol=0)


@pytest.mark.slow
def test_training_stops_when_the_server_stays_away_and_resumes(tmp_path, server, overlap, undisturbed):
    folder = tmp_path / "there"
    server.wait()
    thread = killer(server, folder, restart=False)
    with pytest.raises(RewardError, match="gave up on http"):
        train(folder, remote(server, patience=1.0), overlap=overlap)
    thread.join()
    done = lines(folder)
    assert 1 <= done < ITERATIONS and list((folder / "run" / "checkpoints").glob("checkpoint-*"))
    server.start()
    resumed = train(folder, remote(server, patience=120.0), resume=True, overlap=overlap)
    torch.testing.assert_close(resumed, undisturbed, rtol=0, atol=0)
