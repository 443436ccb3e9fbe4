"""Rollout workers, as real processes of Ray: the numbers of a run without them, also where one is killed."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL.Image import Image
from safetensors.torch import load_file

from flowalign.config import kind_of, load, recipe
from flowalign.errors import ConfigError
from flowalign.settings import parse
from flowalign.training import Trainer
from flowalign.training.workers.fleet import Fleet
from rewards.base import FunctionReward, Spec
from tests.flowalign.training.processes import together
from tests.flowalign.training.small_run import settings


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("tiny_sd3/flow_grpo", ["rollout.workers={count: 25}"], "25 workers, and an iteration has 24 groups"),
        ("tiny_sd3/draft", ["rollout.workers={count: 1}"], "'draft' cannot learn from samples of other processes"),
        ("tiny_sd3/nft", ["rollout.workers={count: 1, staleness: 1}"], "'nft' has no ratios to earlier weights"),
        (
            "tiny_lm/dapo",
            ["rollout.workers={count: 1, staleness: 1}", "data.dynamic_sampling={}"],
            "data.dynamic_sampling: chooses groups",
        ),
        (
            "tiny_lm/grpo",
            ["rollout.workers={count: 1, staleness: 1}", "model.dtype=bfloat16"],
            "training.old_log_prob: .* algorithm.off_policy",
        ),
        ("tiny_sd3/raft", ["rollout.workers={count: 1}", "rollout.search={}"], "a search asks for rewards"),
        ("tiny_lm/grpo", ["rollout.workers={count: 0}"], "rollout.workers.count"),
    ],
)
def test_what_workers_cannot_do_is_refused_before_a_model_loads(name: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        load(recipe(name), overrides).check(1)
    assert "\n" not in str(raised.value)


def test_several_learners_want_a_ray_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match="2 processes learn, .* RAY_ADDRESS"):
        load(recipe("tiny_sd3/flow_grpo"), ["rollout.workers={count: 1}"]).check(2)


def test_rewards_of_latents_are_refused_before_a_worker_starts(tmp_path: Path) -> None:
    config = load(recipe("tiny_sd3/flow_grpo"), ["rollout.workers={count: 1}", f"output={tmp_path}", "name=run"])
    reward = FunctionReward(lambda samples, prompts: [0.0] * len(samples))
    reward.name, reward.spec = "of_latents", Spec(frozenset({"latents"}))
    with pytest.raises(ConfigError, match="'of_latents' needs latents; without workers it works"):
        Trainer(config, reward=reward, progress=False)


def test_a_missing_ray_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowalign.config.workers.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"ray is not installed; pip install 'flowalign\[ray\]'"):
        load(recipe("tiny_sd3/flow_grpo"), ["rollout.workers={count: 1}"]).check(1)


def test_a_ray_without_a_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowalign.config.workers.version", lambda name: "2.59.1")
    with pytest.raises(ConfigError, match=r"Ray 2\.59\.1 lets in whoever reaches its ports"):
        load(recipe("tiny_sd3/flow_grpo"), ["rollout.workers={count: 1}"]).check(1)


@pytest.fixture(scope="module", autouse=True)
def as_urgent_as_other_tests() -> Iterator[None]:
    """At Ray's niceness of 15 workers wait until no other test computes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        yield


@pytest.fixture(scope="module")
def started() -> Iterator[Any]:
    """Ray on this machine, which trainers find running."""
    ray = pytest.importorskip("ray", reason="ray is not installed (pip install 'flowalign[ray]')")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="CRITICAL")
    yield ray
    ray.shutdown()


def process(trainer: Trainer, number: int = 0) -> int:
    """Id of a worker's process."""
    assert isinstance(trainer.engine, Fleet)
    ask = trainer.engine.slots[number].worker.__ray_call__.remote(lambda worker: os.getpid())
    return int(trainer.engine.ray.get(ask))


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.policy.trainable().values()]


def measured(folder: Path) -> list[dict[str, float]]:
    """The metrics of a run's iterations, without times and what only workers have."""
    rows = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if not k.startswith(("seconds/", "workers/"))} for row in rows]


@pytest.mark.slow
def test_a_run_whose_worker_is_killed_has_the_numbers_of_one_without_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a Ray that the run starts itself, whose workers are no nicer than the run."""
    pytest.importorskip("ray", reason="ray is not installed (pip install 'flowalign[ray]')")
    monkeypatch.delenv("RAY_worker_niceness")
    # parts that are whole network batches
    plain = settings(tmp_path / "plain", **{"rollout.batch_size": 4, "training.iterations": 3})
    calls: list[int] = []
    victim: list[int] = []

    def brightness(samples: Sequence[Image], prompts: Sequence[str]) -> list[float]:
        calls.append(len(samples))
        if len(calls) == 3 and victim:
            # after the first part of the second iteration
            os.kill(victim[0], signal.SIGKILL)
        return [float(np.asarray(sample).mean()) for sample in samples]

    alone = Trainer(parse(kind_of(plain), plain), reward=brightness, progress=False)
    alone.train()
    calls.clear()
    shared = settings(
        tmp_path / "shared",
        **{"rollout.batch_size": 4, "training.iterations": 3, "rollout.workers": {"count": 2}},
    )
    trainer = Trainer(parse(kind_of(shared), shared), reward=brightness, progress=False)
    victim.append(process(trainer))
    assert os.getpriority(os.PRIO_PROCESS, victim[0]) == os.getpriority(os.PRIO_PROCESS, 0)
    trainer.train()
    assert measured(tmp_path / "shared") == measured(tmp_path / "plain")
    assert all(torch.equal(mine, other) for mine, other in zip(weights(trainer), weights(alone), strict=True))
    rows = [json.loads(row) for row in (tmp_path / "shared" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(row["workers/restarts"] for row in rows) == 1
    assert all(row["workers/staleness"] == 0 for row in rows)


@pytest.fixture
def cluster() -> Iterator[str]:
    """The address of a Ray that `ray start` began, to which others bring its user's token."""
    pytest.importorskip("ray", reason="ray is not installed (pip install 'flowalign[ray]')")
    with socket.socket() as one, socket.socket() as other:
        ports = []
        for free in (one, other):
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    words = ["--block", "--head", f"--port={ports[0]}", f"--ray-client-server-port={ports[1]}"]
    words += ["--num-cpus=2", "--num-gpus=0"]
    program = [sys.executable, "-m", "ray.scripts.scripts", "start", *words, "--include-dashboard=false"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as head:
        assert head.stdout is not None
        assert any("Ray runtime started" in line for line in head.stdout)
        yield f"127.0.0.1:{ports[0]}"
        head.terminate()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_learners_with_a_worker_each_have_the_numbers_of_two_without(cluster: str, tmp_path: Path) -> None:
    own = {"rollout.batch_size": 4, "training.iterations": 2}
    plain = settings(tmp_path / "plain", **own)
    shared = settings(tmp_path / "shared", **own, **{"rollout.workers": {"count": 1}})
    for values, environment in ((plain, {}), (shared, {"RAY_ADDRESS": cluster})):
        folder = Path(values["output"])
        folder.mkdir()
        (folder / "config.yaml").write_text(yaml.safe_dump(values))
        (folder / "launch.yaml").write_text(yaml.safe_dump(environment))
        together(2, folder)
    assert measured(tmp_path / "shared") == measured(tmp_path / "plain")
    made, expected = (
        load_file(tmp_path / name / "run/lora/pytorch_lora_weights.safetensors") for name in ("shared", "plain")
    )
    assert made.keys() == expected.keys() and all(torch.equal(made[name], expected[name]) for name in made)


@pytest.mark.slow
def test_a_run_of_texts_that_samples_ahead_goes_on_bit_for_bit(started: Any, tmp_path: Path) -> None:
    overrides = [
        "rollout.workers={count: 1, staleness: 1}",
        "algorithm.off_policy={level: token}",
        "evaluation.prompts=null",
        "training.iterations=4",
        "training.prompts_per_iteration=4",
        "training.checkpoint_every=2",
        "training.optimizer.warmup_updates=0",
        "training.optimizer.learning_rate=1e-3",
        f"output={tmp_path}",
        "name=run",
    ]
    config = load(recipe("tiny_lm/grpo"), overrides)
    whole = Trainer(config, progress=False)
    whole.train()
    rows = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["workers/staleness"] for row in rows] == [0, 1, 1, 1]
    # before the weights moved there is nothing to correct
    corrected = [row["policy/off_policy_weight"] != pytest.approx(1, abs=1e-5) for row in rows]
    assert corrected == [False, True, True, True]
    after, before = weights(whole), measured(tmp_path)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "checkpoint-000004")
    again = Trainer(config, progress=False, resume=True)
    assert again.iteration == 2
    again.train()
    assert measured(tmp_path) == before
    assert all(torch.equal(mine, other) for mine, other in zip(weights(again), after, strict=True))
