"""Several processes: the numbers of one, whole or in shards; other numbers of them at resumption; and one that dies."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from torch.multiprocessing import ProcessExitedException

from flowalign.config import load, recipe
from flowalign.errors import ConfigError
from flowalign.planning.tiny_pipelines import build
from flowalign.runs.result import Result
from flowalign.training.building import build_accelerator
from flowalign.training.distributed.sharding import Sharding, check_settings
from rewards.shapes import draw, parse
from tests.flowalign.training.processes import Launch, go_on, together
from tests.flowalign.training.small_run import settings

HERE = Path(__file__).parents[1]
LAUNCH = sorted((HERE.parents[2] / "configs" / "accelerate").glob("*.yaml"))
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
SPLIT = {
    "rewards": [{"name": "recording:brightness"}],
    # three prompts cannot be shared evenly by two or four processes
    "evaluation": {"prompts": "shapes_heldout", "limit": 3, "every": 2, "steps": 2, "save_samples": 2},
    "training.iterations": 2,
    "training.prompts_per_iteration": 4,
    "training.micro_batch_size": 2,
    "training.previews": 1,
    "training.ema_decay": 0.9,
    # a CPU's matrix products depend, in their last bits, on the batch: every process count samples by fours
    "rollout.batch_size": 4,
    # of a network with two blocks: each is gathered by itself, which takes longer than its work
    "rollout.height": 8,
    "rollout.width": 8,
    "model.encode": {"max_sequence_length": 20},
}
"""what makes a small run one that processes can share"""
QUICK = {"evaluation": {}, "training.previews": 0}
# a group for each of two processes
HEAVY = QUICK | {"training.prompts_per_iteration": 2}
RUNS: dict[str, dict[str, Any]] = {
    "lora": {},
    "full": QUICK | {"model.lora": None, "algorithm.kl_weight": 0.1, "training.optimizer.learning_rate": 1e-5},
    # completes trajectories; a head of its own learns values, and the baseline is fitted to those of all processes
    "dense_grpo": QUICK
    | {
        "algorithm": {
            "name": "dense_grpo",
            "loss": {"clip_range": 0.01},
            "baseline": "fitted",
            "estimator": {"kind": "learned", "warmup": 1},
        },
        "rollout.plan": {"name": "window", "start": 0, "size": 2},
    },
    # a network of its own is trained with the policy
    "reinflow": QUICK
    | {
        "algorithm": {"name": "reinflow", "loss": {"clip_range": 0.01}, "noise_low": 0.15, "noise_high": 0.6},
        "rollout.kernel": "ode",
        "rollout.eta": 1.0,
    },
    # learns from pictures on disk
    "dpo": QUICK | {"algorithm": {"name": "dpo", "beta": 20, "min_pairs": 1}},
    # compares with a snapshot of all weights, in shards too
    "nft": QUICK
    | {
        "model.lora": None,
        "algorithm": {"name": "nft", "levels": {"count": 1}, "old": {"decay": 0.5}},
        "training.optimizer.learning_rate": 1e-5,
    },
    # trains further sets of weights, by whole groups
    "tdm_r1": HEAVY | {"algorithm": {"name": "tdm_r1", "levels": {"count": 2}, "reference_guidance": 2.0}},
    # its gradient flows through two calls of the network, each computed again
    "draft": HEAVY
    | {
        "rewards": [{"name": "tiny_clip"}],
        "algorithm": {"name": "draft", "last_steps": 2, "kl_weight": 1.0},
        "rollout.kernel": "ode",
    },
    # each text takes as many forwards as it has tokens
    "grpo": {
        "model": {"kind": "text", "path": "tiny_lm", "lora": None},
        "data": {"prompts": "sums_train"},
        "rewards": [{"name": "exact_match"}],
        "algorithm": {"name": "grpo", "kl_weight": 0.1},
        "rollout": {"max_new_tokens": 5, "batch_size": 4},
        "evaluation": {"prompts": "sums_heldout", "limit": 3, "every": 2, "max_new_tokens": 5},
        "training.optimizer.learning_rate": 1e-4,
    },
}
# text encoders, which no wrapper averages the gradients of, with the denoiser
TEXTS = RUNS["draft"] | {
    "model.text_lora": {"rank": 2, "encoders": ["text_encoder", "text_encoder_2"]},
    "rollout.guidance": 2.0,
}
# a discriminator, which moves with weights that are not the policy's
GAN = HEAVY | {
    "algorithm": {
        "name": "dmd2",
        "levels": {"count": 2},
        "gan": {"real": "teacher", "steps": 2, "weight": 100.0, "fake_weight": 1.0},
        "fake": {"alone": 0, "learning_rate": 5e-3},
    }
}
# of some prompts every sample has the same reward, so that the processes have unequal numbers of pairs
PAIRS = QUICK | {
    "rewards": [{"name": "recording:brightness_of_squares"}],
    "algorithm": {"name": "online_dpo", "levels": {"count": 2}},
}
COPIES = {"texts": TEXTS, "gan": GAN, "pairs": PAIRS}
"""not in shards"""
CROWDED = QUICK | {
    "algorithm": {"name": "recording:CrowdedFlowGRPO", "loss": {"clip_range": 0.01}},
    "rollout.batch_size": 16,
}
LATE = QUICK | {
    "rewards": [{"name": "recording:late_brightness"}],
    "training.patience": 6,
    "training.iterations": 1,
}
CLOSE = 0.002
"""share of an iteration's movement; 0.00008 at most was seen, 0.47 of a head that every process trained for itself"""
LONG = {"training.iterations": 10_000, "training.patience": 6, "evaluation": {}, "training.previews": 0}
# `--cpu --num_processes 2` starts one process (accelerate 1.15); this starts two, here on the CPU
ACCELERATE = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "OMP_NUM_THREADS": "1",
    "ACCELERATE_USE_CPU": "true",
}


@pytest.fixture(autouse=True, scope="module")
def named_by_dotted_path() -> Iterator[None]:
    """`recording` is imported in this process too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HERE)
        yield


def prepare(folder: Path, launch: dict[str, str] | None = None, **changes: Any) -> Path:
    """A folder with the configuration of a small run; changes are 'section.key': value."""
    folder.mkdir(parents=True)
    if "model" not in changes:
        build("sd35").save_pretrained(folder / "model")
        changes["model.path"] = str(folder / "model")
    values = settings(folder, **(SPLIT | changes))
    if values["algorithm"]["name"] == "dpo":
        values["data"] = {"prompts": str(preferences(folder))}
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    (folder / "launch.yaml").write_text(yaml.safe_dump(launch or {}))
    return folder


def preferences(folder: Path) -> Path:
    """Pairs of a drawing of the prompt and one of another prompt, in a file."""
    rng = np.random.default_rng(0)
    pairs = folder / "preferences.jsonl"
    texts = ["a red circle", "a blue square", "two green triangles", "a yellow square"]
    with open(pairs, "w") as lines:
        for i, prompt in enumerate(texts):
            drawn = {"chosen": prompt, "rejected": texts[i - 1]}
            for key, text in drawn.items():
                Image.fromarray(draw(parse(text), rng)).save(folder / f"{key}{i}.png")
            lines.write(json.dumps({"prompt": prompt} | {key: f"{key}{i}.png" for key in drawn}) + "\n")
    return pairs


def alone(folder: Path) -> Path:
    """Train, or go on, in this process."""
    go_on(folder)
    return folder


def after_one_iteration(folder: Path, copy: Path, launch: dict[str, str] | None = None) -> Path:
    """A copy of a run that was cut off before its second iteration, to go on with."""
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "run" / "checkpoints" / "checkpoint-000002")
    values = yaml.safe_load((copy / "config.yaml").read_text()) | {"output": str(copy)}
    (copy / "config.yaml").write_text(yaml.safe_dump(values))
    (copy / "launch.yaml").write_text(yaml.safe_dump(launch or {}))
    return copy


def saved(folder: Path, name: str = "trainable", iteration: int = 2) -> dict[str, torch.Tensor]:
    return load_file(folder / "run" / "checkpoints" / f"checkpoint-{iteration:06d}" / f"{name}.safetensors")


def state_of(folder: Path) -> dict[str, Any]:
    """Of the last checkpoint, what is not a tensor."""
    return json.loads((folder / "run" / "checkpoints" / "checkpoint-000002" / "state.json").read_text())


def apart(folder: Path, other: Path, name: str = "trainable") -> float:
    """How far the weights of two runs are apart, as a share of how far the second iteration moved them."""
    mine, theirs, before = saved(folder, name), saved(other, name), saved(other, name, iteration=1)
    assert mine.keys() == theirs.keys()
    moved = torch.cat([(theirs[name] - before[name]).flatten() for name in theirs])
    between = torch.cat([(mine[name] - theirs[name]).flatten() for name in theirs])
    return float(between.norm() / moved.norm())


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every run on one process."""
    folder = tmp_path_factory.mktemp("one")
    return {name: alone(prepare(folder / name, **changes)) for name, changes in (RUNS | COPIES).items()}


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """A run that mostly waits, while the runs of `two` work."""
    return Launch(2, prepare(tmp_path_factory.mktemp("late") / "late", **LATE))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, late: Launch) -> dict[str, Path]:
    """'way run' on two processes."""
    folder = tmp_path_factory.mktemp("two")
    made = {f"shards {name}": prepare(folder / name, FSDP, **changes) for name, changes in RUNS.items()}
    made["copies lora"] = prepare(folder / "copies")
    made |= {f"copies {name}": prepare(folder / name, **changes) for name, changes in COPIES.items()}
    made["shards, on disk lora"] = prepare(folder / "disk", FSDP, **QUICK, **{"rollout.store": "disk"})
    made["copies, crowded lora"] = prepare(folder / "crowded", **CROWDED)
    (folder / "stderr").write_text(together(2, *made.values()))
    return made


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, one: dict[str, Path], two: dict[str, Path]) -> dict[str, Path]:
    """'way run' on four processes, and runs that one and two processes began: each way is gone on with."""
    folder = tmp_path_factory.mktemp("four")
    made = {
        "shards lora": prepare(folder / "lora", FSDP),
        "two processes, then copies lora": after_one_iteration(two["copies lora"], folder / "two_copies"),
        "two processes, then shards lora": after_one_iteration(two["shards lora"], folder / "two_shards", FSDP),
        "one process, then shards full": after_one_iteration(one["full"], folder / "one_full", FSDP),
    }
    together(4, *made.values())
    return made


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "label", ["copies lora", *(f"copies {name}" for name in COPIES), *(f"shards {name}" for name in RUNS)]
)
def test_two_processes_give_the_run_of_one(one: dict[str, Path], two: dict[str, Path], label: str) -> None:
    assert apart(two[label], one[label.split()[-1]]) < CLOSE


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_metrics_are_means_of_the_items_of_all_processes(one: dict[str, Path], two: dict[str, Path]) -> None:
    alone, shared = (Result(folder / "run").metrics for folder in (one["pairs"], two["copies pairs"]))
    for name in ("matching/error", "preference/accuracy", "policy/loss"):
        assert [line[name] for line in shared] == pytest.approx([line[name] for line in alone], rel=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_trajectories_that_wait_on_disk_have_the_same_bits_on_two_processes(two: dict[str, Path]) -> None:
    """Where each has files of its own; on the host nothing is shared (test_store.py)."""
    for name in ("trainable", "optimizer", "ema"):
        mine, theirs = saved(two["shards, on disk lora"], name), saved(two["shards lora"], name)
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in theirs), name


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_discriminator_learns_from_all_processes(one: dict[str, Path], two: dict[str, Path]) -> None:
    assert any(key.startswith("discriminator") for key in saved(one["gan"], "snapshot_fake"))
    assert apart(two["copies gan"], one["gan"], "snapshot_fake") < CLOSE


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_process_whose_memory_runs_out_in_a_rollout_halves_its_batches_alone(
    one: dict[str, Path], two: dict[str, Path]
) -> None:
    folder = two["copies, crowded lora"]
    told = (folder.parent / "stderr").read_text()
    assert told.count("out of memory with rollout.batch_size 16; going on with 8") == 1
    assert told.count("out of memory with rollout.batch_size 8; going on with 4") == 1
    assert apart(folder, one["lora"]) < CLOSE


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_process_that_is_alive_and_late_is_named_while_the_others_wait(late: Launch) -> None:
    told = late.finish()
    assert re.search(
        rf"all others have waited 2\d s for process 1 \({os.uname().nodename}, pid \d+\), which is alive; it is at: "
        r"iteration 0, sampling and scoring, recording.py:\d+ late_brightness",
        told,
    )
    assert told.count("all others have waited") == 1


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_four_processes_give_the_run_of_one_from_the_start_and_resumed(
    one: dict[str, Path], four: dict[str, Path]
) -> None:
    for label, folder in four.items():
        assert apart(folder, one[label.split()[-1]]) < CLOSE, label
        # of all processes, whoever made them
        assert state_of(folder)["actor"]["reward_calls"] == 32, label


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_shards_of_two_processes_go_on_in_one(tmp_path: Path, one: dict[str, Path], two: dict[str, Path]) -> None:
    folder = alone(after_one_iteration(two["shards lora"], tmp_path / "on_one"))
    assert apart(folder, one["lora"]) < CLOSE
    assert state_of(folder)["actor"]["reward_calls"] == state_of(one["lora"])["actor"]["reward_calls"] == 32


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_shards_save_what_copies_save(two: dict[str, Path]) -> None:
    for part in ("trainable", "optimizer", "ema"):
        copies, shards = saved(two["copies lora"], part), saved(two["shards lora"], part)
        for key, value in copies.items():
            torch.testing.assert_close(shards[key], value, atol=1e-6, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_shards_export_whole_averaged_weights(two: dict[str, Path]) -> None:
    check_export(two["shards full"])
    check_export(two["shards grpo"])
    assert (two["shards lora"] / "run" / "lora").is_dir()


def check_export(folder: Path) -> None:
    (file,) = (folder / "run" / "model").rglob("*model.safetensors")
    exported = load_file(file)
    for key, value in saved(folder, "ema").items():
        assert torch.equal(exported[key], value)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_dead_process_ends_the_run_with_its_name_and_the_run_resumes(tmp_path: Path) -> None:
    """Begun as on the command line, by accelerate, whose launcher is torchrun's."""
    folder = prepare(tmp_path / "run", **LONG)
    line = [sys.executable, "-m", *ACCELERATE, "-m", "flowalign", "train", str(folder / "config.yaml")]
    run = subprocess.Popen(line, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    metrics = folder / "run" / "metrics.jsonl"
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 1):
        assert run.poll() is None, run.stderr.read()
        time.sleep(0.1)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    workers = {rank_of(int(child)): int(child) for child in children}
    assert yaml.safe_load((folder / "run" / "versions.yaml").read_text())["processes"] == 2
    os.kill(workers["1"], signal.SIGKILL)
    begin = time.monotonic()
    told = run.stderr.read()
    assert run.wait() != 0 and time.monotonic() - begin < 60
    assert "Signal 9 (SIGKILL)" in told and f"(pid: {workers['1']})" in told
    done = len(metrics.read_text().splitlines())
    values = yaml.safe_load((folder / "config.yaml").read_text())
    values["training"]["iterations"] = done + 1
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    alone(folder)
    assert len(metrics.read_text().splitlines()) == done + 1


@pytest.mark.slow
def test_a_hung_process_ends_the_run_with_its_name(tmp_path: Path) -> None:
    folder = prepare(tmp_path / "run", **LONG)
    run, metrics = Launch(2, folder), folder / "run" / "metrics.jsonl"
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 1):
        time.sleep(0.1)
    os.kill(run.pids[1], signal.SIGSTOP)
    begin = time.monotonic()
    hung = f"process 1 ({os.uname().nodename}, pid {run.pids[1]}) has given no sign of life for 6 s"
    while hung not in run.told():
        assert time.monotonic() - begin < 60, run.told()
        time.sleep(0.1)
    # or it would be waited for before it is killed
    os.kill(run.pids[1], signal.SIGKILL)
    with pytest.raises(ProcessExitedException):
        run.finish()


def rank_of(pid: int) -> str:
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.partition("=")[::2] for entry in variables)["RANK"]


def test_fsdp_of_version_1_is_refused_with_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match="fsdp_version: 2"):
        Sharding.configured(torch.device("cpu"))


@pytest.mark.parametrize(
    "override", ["data.dynamic_sampling={rounds: 2}", "data.replay={groups: 4, age: 2}", "training.optimizer.bits=8"]
)
def test_what_does_not_go_with_shards_is_refused(override: str) -> None:
    config = load(recipe("tiny_sd3/flow_grpo"), [override])
    with pytest.raises(ConfigError, match=f"{override.split('=')[0]}.* work"):
        check_settings(config)
    if override.startswith("data."):
        check_settings(load(recipe("tiny_lm/grpo"), [override]))


def test_methods_and_text_encoders_that_cannot_be_in_shards_are_refused() -> None:
    for name, message in (("hypernoise", "algorithm: hypernoise.* work"), ("texforce", "model.text_lora.* work")):
        with pytest.raises(ConfigError, match=message):
            check_settings(load(recipe(f"tiny_sd3/{name}")))


def test_deepspeed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ConfigError, match="DeepSpeed.* not supported; configs/accelerate/fsdp2.yaml shards"):
        build_accelerator()


@pytest.mark.parametrize("path", LAUNCH, ids=lambda p: p.stem)
def test_accelerate_reads_the_launch_configurations(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    settings = load_config_from_file(str(path))
    assert settings.mixed_precision == "no"
    assert (settings.distributed_type == "FSDP") == ("fsdp2" in path.stem)


def test_a_process_ends_with_its_launcher_while_it_waits_for_the_others() -> None:
    waiting = (
        "import flowalign; from flowalign.training.building import build_accelerator; print('waiting', flush=True); "
        "build_accelerator()"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    launcher = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {waiting!r}])"],
        env=os.environ | world,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert launcher.stdout is not None
    while "waiting" not in launcher.stdout.readline():
        pass
    launcher.kill()
    # the end of what it prints is the end of the process
    assert "the launcher is gone, and the processes have not met" in launcher.stdout.read()
    launcher.wait()
