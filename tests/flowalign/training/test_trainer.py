"""The training loop: the same weights however it is interrupted or spread, and results that plain diffusers loads."""

import json
import math
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import load_file

from flowalign.app.loading import load_for_sampling
from flowalign.config import load, recipe
from flowalign.data import ASSETS
from flowalign.errors import ConfigError, FlowalignError
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.runs.checkpoint import Checkpoints
from flowalign.training import Trainer, signals
from flowalign.training.signals import Stopped
from rewards import RewardError
from tests.flowalign.training.processes import FORKS, go_on, together
from tests.flowalign.training.small_run import settings


@pytest.fixture
def fresh_state() -> Iterator[None]:
    """Accelerate keeps what the first of its users in a process was told."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def brightness(images: list, prompts: list[str]) -> list[float]:
    return [float(np.asarray(image).mean() / 255) for image in images]


def run(folder: Path, reward: Any = brightness, resume: bool = False, **changes: Any) -> Trainer:
    trainer = Trainer(settings(folder, **changes), reward=reward, resume=resume, progress=False)
    trainer.train()
    return trainer


def records(folder: Path, name: str = "metrics") -> list[dict[str, float]]:
    """A run's metrics without the times."""
    lines = [json.loads(line) for line in (folder / "run" / f"{name}.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("seconds")} for line in lines]


def weights(folder: Path, iteration: int = 4, name: str = "trainable") -> dict[str, torch.Tensor]:
    return load_file(folder / "run" / "checkpoints" / f"checkpoint-{iteration:06d}" / f"{name}.safetensors")


def assert_same_run(folder: Path, other: Path) -> None:
    """Bit for bit."""
    for name in ("trainable", "optimizer", "ema"):
        mine, theirs = weights(folder, name=name), weights(other, name=name)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine), name
    assert records(folder) == records(other)
    assert records(folder, "evaluations") == records(other, "evaluations")


WITH_EVALUATION = {
    "evaluation": {
        "prompts": "shapes_heldout", "limit": 3, "every": 2, "steps": 2, "save_samples": 2, "batch_size": 2
    },
    "training.previews": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    run(folder, **WITH_EVALUATION, **{"training.ema_decay": 0.9})
    return folder


def test_metrics_of_an_iteration(uninterrupted: Path) -> None:
    lines = records(uninterrupted)
    assert [line["iteration"] for line in lines] == [0, 1, 2, 3]
    names = {"reward/mean", "reward/std", "reward/zero_spread", "policy/ratio", "policy/clip_fraction"}
    for line in lines:
        assert names | {"policy/gradient_norm", "policy/loss", "learning_rate"} <= line.keys()
        assert all(math.isfinite(value) for value in line.values())
    raw = json.loads((uninterrupted / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert {"seconds/rollout", "seconds/reward", "seconds/update"} <= raw.keys()
    rates = [line["learning_rate"] for line in lines]
    # of the second and last update of each iteration
    assert rates == pytest.approx([0.875e-3, 0.625e-3, 0.375e-3, 0.125e-3])


def test_the_first_update_has_ratio_one(tmp_path: Path) -> None:
    run(tmp_path, **{"training.iterations": 1, "training.updates_per_iteration": 1})
    [line] = records(tmp_path)
    assert line["policy/ratio"] == pytest.approx(1, abs=1e-6) and line["policy/clip_fraction"] == 0


def test_the_runs_folder_holds_what_made_it(uninterrupted: Path) -> None:
    folder = uninterrupted / "run"
    config = load(folder / "config.yaml")
    assert config.training.ema_decay == 0.9 and config.training.iterations == 4
    assert load(folder / "config.yaml") == config
    versions = yaml.safe_load((folder / "versions.yaml").read_text())
    assert {"flowalign", "torch", "diffusers", "python"} <= versions.keys()
    # keep_checkpoints
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "checkpoint-000003",
        "checkpoint-000004",
    ]


def test_evaluations_are_the_same_pictures_every_time(uninterrupted: Path) -> None:
    lines = records(uninterrupted, "evaluations")
    assert [line["iteration"] for line in lines] == [0, 2, 4]
    assert all(line["all/samples"] == 3 and 0 <= line["all/reward"] <= 1 for line in lines)
    for iteration in (0, 2, 4):
        folder = uninterrupted / "run" / "samples" / f"iteration-{iteration:06d}"
        listed = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        assert [entry["seed"] for entry in listed] == [1_000_000, 1_000_002]
        assert all((folder / entry["picture"]).is_file() and entry["prompt"] for entry in listed)


def test_the_exported_lora_is_the_average_and_loads_in_plain_diffusers(uninterrupted: Path) -> None:
    """The last evaluation picture, made again without flowalign."""
    run_folder = uninterrupted / "run"
    pipe = StableDiffusion3Pipeline.from_pretrained(
        ASSETS / "tiny_sd3", text_encoder_3=None, tokenizer_3=None, dtype=torch.float32
    )
    pipe.set_progress_bar_config(disable=True)
    pipe.load_lora_weights(run_folder / "lora")
    loaded = {k.replace(".default_0.", ".default."): v for k, v in pipe.transformer.named_parameters() if "lora" in k}
    average, last = weights(uninterrupted, name="ema"), weights(uninterrupted)
    assert all(torch.equal(loaded[name], value) for name, value in average.items())
    assert any(not torch.equal(last[name], value) for name, value in average.items())
    folder = run_folder / "samples" / "iteration-000004"
    entry = json.loads((folder / "samples.jsonl").read_text().splitlines()[1])
    generator = torch.Generator().manual_seed(entry["seed"])
    call = {"num_inference_steps": 2, "guidance_scale": 1.0, "max_sequence_length": 0, "generator": generator}
    image = np.asarray(pipe(entry["prompt"], **call).images[0]).astype(int)
    from PIL import Image

    assert np.abs(image - np.asarray(Image.open(folder / entry["picture"])).astype(int)).max() <= 1


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (lambda n: [0.5] * (n - 1) + [float("nan")], "returned nan for the prompt"),
        (lambda n: [0.5] * (n - 1) + [float("-inf")], "returned -inf for the prompt"),
        (lambda n: [0.5] * (n + 1), "returned 9 values for 8 samples"),
    ],
)
def test_a_broken_reward_stops_the_run_and_the_last_checkpoint_stays_usable(
    tmp_path: Path, uninterrupted: Path, answer: Callable[[int], list[float]], complaint: str
) -> None:
    calls = 0
    prompt = ""

    def treacherous(images: list, prompts: list[str]) -> list[float]:
        nonlocal calls, prompt
        calls += len(images) == 8
        prompt = prompts[-1]
        return answer(8) if calls == 1 else brightness(images, prompts)

    # as it was before its last iteration
    shutil.copytree(uninterrupted, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "checkpoint-000004")
    changes = {**WITH_EVALUATION, "training.ema_decay": 0.9}
    with pytest.raises(RewardError, match=f"reward 'treacherous' {complaint}") as caught:
        run(tmp_path, treacherous, resume=True, **changes)
    assert "values for" in complaint or repr(prompt) in str(caught.value)
    run(tmp_path, resume=True, **changes)
    assert_same_run(tmp_path, uninterrupted)


def test_a_policy_on_another_device_is_refused(tmp_path: Path) -> None:
    policy = DiffusersPolicy.from_pretrained(ASSETS / "tiny_sd3")
    policy.device = torch.device("meta")
    with pytest.raises(
        ConfigError, match=r"policy: it is on 'meta', and this process trains on '\w+(:0)?'; from_pretr"
    ):
        Trainer(load(recipe("tiny_sd3/flow_grpo"), [f"output={tmp_path}"]), policy)


def test_a_run_is_not_written_over(uninterrupted: Path) -> None:
    with pytest.raises(ConfigError, match="--resume"):
        Trainer(settings(uninterrupted), reward=brightness)


def test_resuming_a_finished_run_changes_nothing(uninterrupted: Path, tmp_path: Path) -> None:
    shutil.copytree(uninterrupted, tmp_path / "copy")
    run(tmp_path / "copy", resume=True, **WITH_EVALUATION, **{"training.ema_decay": 0.9})
    assert_same_run(tmp_path / "copy", uninterrupted)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model.lora.rank": 4}, "model.lora.rank: the run was trained with 2 and cannot go on with 4"),
        ({"model.lora": None}, "model.lora: the run was trained with a LoRA and cannot go on with all weights"),
        ({"training.ema_decay": None}, "training.ema_decay: .* an average and cannot go on with no average"),
        ({"data.selection": {"name": "sec"}}, "data.selection.name: .* shuffled and cannot go on with sec"),
        ({"algorithm": {"name": "dance_grpo"}}, "algorithm.name: .* flow_grpo and cannot go on with dance_grpo"),
        ({"rollout.plan": {"name": "calibrated"}}, "rollout.plan.name: .* cannot go on with calibrated"),
    ],
)
def test_a_run_does_not_go_on_with_what_would_not_fit(uninterrupted: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Trainer(
            settings(uninterrupted, **{**WITH_EVALUATION, "training.ema_decay": 0.9, **changes}),
            reward=brightness,
            resume=True,
        )


def test_a_run_that_goes_on_says_what_is_set_otherwise_and_serves_its_newest_weights(
    uninterrupted: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(uninterrupted, tmp_path / "copy")
    folder = tmp_path / "copy" / "run"
    first = (folder / "config.yaml").read_text()
    changes = {**WITH_EVALUATION, "training.ema_decay": 0.9, "training.seed": 7, "training.iterations": 6}

    # damaged behind the run's back: it goes on from iteration 3
    (folder / "checkpoints" / "checkpoint-000004" / "optimizer.safetensors").write_bytes(b"damaged")
    calls = 0

    def later(images: list, prompts: list[str]) -> list[float]:
        nonlocal calls
        calls += len(images) == 8
        if calls == 2:
            raise RuntimeError
        return brightness(images, prompts)

    with pytest.raises(RewardError):
        run(tmp_path / "copy", later, resume=True, **changes)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("flowalign")]
    assert "checkpoint-000004 is damaged (optimizer.safetensors is not as it was written)" in said[0]
    assert "goes on with other settings: rewards" in said[1]
    assert said[1].endswith("training.iterations: 4 -> 6; training.seed: 0 -> 7")
    assert (folder / "config-until-000003.yaml").read_text() == first
    assert load(folder / "config.yaml").training.seed == 7
    # the run did not come to its end, and its LoRA is its newest checkpoint's all the same
    newest = Checkpoints(folder / "checkpoints", keep=2).newest()
    assert newest is not None and newest.name == "checkpoint-000004"
    [served] = (folder / "lora").glob("*.safetensors")
    own, new, old = (
        load_file(place / served.name) for place in (folder / "lora", newest, uninterrupted / "run" / "lora")
    )
    assert all(torch.equal(value, new[name]) for name, value in own.items())
    assert any(not torch.equal(value, old[name]) for name, value in own.items())
    assert served.stat().st_mode & 0o777 == 0o644


def test_a_signal_ends_the_run_with_a_checkpoint(
    uninterrupted: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    calls = 0

    def interrupted(images: list, prompts: list[str]) -> list[float]:
        nonlocal calls
        calls += len(images) == 8
        if calls == 2 and len(images) == 8:
            signal.raise_signal(signal.SIGTERM)
        return brightness(images, prompts)

    changes = {**WITH_EVALUATION, "training.ema_decay": 0.9, "training.checkpoint_every": 0}
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped, match="SIGTERM: left after 2 of 4 iterations; --resume goes on") as left:
        run(tmp_path, interrupted, **changes)
    assert left.value.exit_code == 75 and signal.getsignal(signal.SIGTERM) is before
    assert "SIGTERM: a checkpoint after this iteration" in capfd.readouterr().err
    run(tmp_path, resume=True, **changes | {"training.checkpoint_every": 1})
    assert_same_run(tmp_path, uninterrupted)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_other_signals_are_noted_alike(number: signal.Signals) -> None:
    with signals.Signals(announce=False) as seen:
        signal.raise_signal(number)
    assert seen.received == number.name


def test_a_second_signal_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "ONCE", 0.02)
    child = os.fork()
    if child == 0:
        with signals.Signals(announce=False) as seen:
            # the second one is the launcher's copy of the first
            for wait in (0, 0, 0.05):
                time.sleep(wait)
                os.kill(os.getpid(), signal.SIGTERM)
        os._exit(seen.received is None)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM


def test_a_reward_that_leaves_python_is_an_error(tmp_path: Path) -> None:
    def leaving(images: list, prompts: list[str]) -> list[float]:
        sys.exit(0)

    with pytest.raises(RewardError, match=r"reward 'leaving' failed: SystemExit: 0 \(.*test_trainer.py, line \d+\)"):
        run(tmp_path, leaving)
    trainer = Trainer(settings(tmp_path / "other"), reward=brightness, progress=False)
    trainer.selection.picks = lambda *_: sys.exit(0)
    with pytest.raises(FlowalignError, match=r"iteration 0: .*test_trainer.py, line \d+, called sys.exit\(0\)"):
        trainer.train()
    with pytest.raises(ConfigError, match=r"rewards.0: .*it calls sys.exit\(0\)"):
        run(tmp_path, None, rewards=[{"name": f"{__name__}:Leaving"}])


def test_a_reward_that_ends_the_process_is_no_success(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    child = os.fork()
    if child == 0:
        run(tmp_path, lambda images, prompts: os._exit(0))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    told = capfd.readouterr().err
    assert "test_trainer.py, line" in told and "called os._exit(0), and the run has not ended; --resume" in told


def test_a_folder_that_is_moved_while_it_is_trained_ends_the_run(tmp_path: Path) -> None:
    trainer = Trainer(settings(tmp_path), reward=brightness, progress=False)
    picks, folder = trainer.selection.picks, trainer.folder

    def moving(*arguments: Any) -> Any:
        if folder.is_dir():
            folder.rename(tmp_path / "elsewhere")
        return picks(*arguments)

    trainer.selection.picks = moving
    with pytest.raises(FlowalignError, match="was moved or removed while it was trained"):
        trainer.train()
    assert not (folder / "metrics.jsonl").exists() and (tmp_path / "elsewhere" / "config.yaml").is_file()


class Leaving:
    """A reward whose constructor leaves Python."""

    name = "leaving"

    def __init__(self) -> None:
        sys.exit(0)


def test_a_run_that_starts_again_forgets_what_was_killed_before_its_first_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = 0

    def failing(images: list, prompts: list[str]) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError
        return brightness(images, prompts)

    changes = {"training.checkpoint_every": 0, "training.iterations": 3}
    with pytest.raises(RewardError):
        run(tmp_path, failing, **changes)
    assert len(records(tmp_path)) == 2
    (tmp_path / "run" / "samples" / "iteration-000002").mkdir(parents=True)
    run(tmp_path, resume=True, **changes)
    assert "nothing to resume" in caplog.text
    assert [line["iteration"] for line in records(tmp_path)] == [0, 1, 2]
    assert not (tmp_path / "run" / "samples").exists()


def test_full_fine_tuning_with_kl(tmp_path: Path, tiny_policy: Callable[..., Any]) -> None:
    changes = {"model.lora": None, "algorithm.kl_weight": 0.1, "training.optimizer.learning_rate": 1e-5}
    trainer = run(tmp_path, **changes, **{"training.iterations": 2, "training.updates_per_iteration": 1})
    first, second = records(tmp_path)
    assert first["policy/kl"] == 0 and second["policy/kl"] > 0
    assert first["policy/ratio"] == pytest.approx(1, abs=1e-6)
    plain = tiny_policy()
    plain.load(tmp_path / "run" / "model")
    made = plain.sample(["a red circle"], [1], steps=2).trajectory.final
    expected = trainer.policy.sample(["a red circle"], [1], steps=2).trajectory.final
    assert torch.equal(made, expected)
    # a run that has not come to its end has no export
    shutil.rmtree(tmp_path / "run" / "model")
    policy, _ = load_for_sampling(str(tmp_path / "run"), None, "float32")
    assert torch.equal(policy.sample(["a red circle"], [1], steps=2).trajectory.final, expected)


def test_kl_to_the_reference_with_lora_keeps_no_second_copy(tmp_path: Path) -> None:
    trainer = run(tmp_path, **{"algorithm.kl_weight": 0.1, "training.iterations": 2})
    assert records(tmp_path)[0]["policy/kl"] >= 0 and trainer.policy._reference is None


def test_the_micro_batch_does_not_change_the_update(tmp_path: Path) -> None:
    changes = {"training.iterations": 1, "training.updates_per_iteration": 1, "training.optimizer.weight_decay": 0.0}
    whole = run(tmp_path / "whole", **changes).learner.parameters
    for size in (1, 3):
        folder = tmp_path / str(size)
        parts = run(folder, **changes, **{"training.micro_batch_size": size}).learner.parameters
        first, second = records(tmp_path / "whole")[0], records(folder)[0]
        assert second == pytest.approx(first, rel=1e-4, abs=1e-7)
        assert whole.keys() == parts.keys()


def test_a_group_without_spread_teaches_nothing(tmp_path: Path) -> None:
    start = Trainer(settings(tmp_path / "start"), reward=brightness, progress=False).learner.parameters
    changes = {"training.iterations": 1, "training.optimizer.weight_decay": 0.0}
    trained = run(tmp_path / "run", lambda images, prompts: [0.5] * len(images), **changes).learner.parameters
    assert all(torch.equal(trained[name], value) for name, value in start.items())
    assert records(tmp_path / "run")[0]["reward/zero_spread"] == 1


# Real processes


def prepare(folder: Path, **changes: Any) -> Path:
    """A folder with the configuration of a run that processes other than this one can read."""
    folder.mkdir()
    values = settings(folder, **{"rewards": [{"name": "recording:brightness"}], **changes})
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    (folder / "launch.yaml").write_text(yaml.safe_dump({"FLOWALIGN_ADVANTAGES": str(folder / "advantages")}))
    return folder


def lines(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.mark.slow
def test_a_run_killed_at_any_moment_and_resumed_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"training.iterations": 12, "training.ema_decay": 0.9}
    monkeypatch.syspath_prepend(Path(__file__).parent)
    go_on(prepare(tmp_path / "whole", **changes))
    killed = prepare(tmp_path / "killed", **changes)
    metrics = tmp_path / "killed" / "run" / "metrics.jsonl"
    generator = random.Random(time.time_ns())  # other moments every time
    done = 0
    for kill in (True, True, True, False):
        child = FORKS.Process(target=go_on, args=(killed,))
        child.start()
        while kill and child.is_alive() and lines(metrics) <= done:
            time.sleep(0.01)
        if kill:
            time.sleep(generator.uniform(0, 1))
            child.kill()
        child.join()
        done = lines(metrics)
        assert child.exitcode in ((-signal.SIGKILL, 0) if kill else (0,))
    for name in ("trainable", "optimizer", "ema"):
        mine, theirs = weights(tmp_path / "killed", 12, name), weights(tmp_path / "whole", 12, name)
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs), name
    assert records(tmp_path / "killed") == records(tmp_path / "whole")
    assert len(records(tmp_path / "whole")) == 12


@pytest.mark.slow
def test_two_processes_give_the_advantages_and_weights_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"algorithm.name": "recording:RecordingFlowGRPO", "training.iterations": 2, **WITH_EVALUATION}
    # previews, which the main process alone makes, would be recorded as well
    changes |= {"training.prompts_per_iteration": 4, "training.checkpoint_every": 0, "training.previews": 0}
    monkeypatch.syspath_prepend(Path(__file__).parent)
    together(2, prepare(tmp_path / "two", **changes))
    monkeypatch.setenv("FLOWALIGN_ADVANTAGES", str(tmp_path / "one" / "advantages"))
    go_on(prepare(tmp_path / "one", **changes))
    one = torch.load(tmp_path / "one" / "advantages.0", weights_only=True)
    for rank in (0, 1):
        two = torch.load(tmp_path / "two" / f"advantages.{rank}", weights_only=True)
        # the rollout's batches differ in size, and that by float summation order
        torch.testing.assert_close(two[0], one[0], atol=1e-3, rtol=0)
    for mine, theirs in zip(records(tmp_path / "two"), records(tmp_path / "one"), strict=True):
        for counted in ("forwards", "reward_calls"):  # of all processes
            assert mine.pop(counted) == theirs.pop(counted) > 0
        assert mine == pytest.approx(theirs, rel=1e-2, abs=1e-4)
    mine, theirs = weights(tmp_path / "two", 2), weights(tmp_path / "one", 2)
    start = Trainer(settings(tmp_path / "start"), reward=brightness, progress=False).learner.parameters
    moved = torch.cat([(theirs[name] - start[name].detach()).flatten() for name in theirs])
    apart = torch.cat([(mine[name] - theirs[name]).flatten() for name in theirs])
    print("moved", moved.norm(), "apart", apart.norm())
    assert apart.norm() < 0.01 * moved.norm()
    versions = yaml.safe_load((tmp_path / "two" / "run" / "versions.yaml").read_text())
    assert versions["processes"] == 2
    evaluations = [records(tmp_path / name, "evaluations") for name in ("one", "two")]
    for mine, theirs in zip(*evaluations, strict=True):
        # a process compares the layouts of its own pictures alone, so that several do not
        whole = {key: value for key, value in theirs.items() if not key.endswith("layout_distance")}
        assert {key: value for key, value in mine.items() if key in whole} == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_what_accelerate_is_usually_told_changes_nothing(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_state: None
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    trainer = Trainer(settings(tmp_path), reward=brightness, progress=False)
    policy = trainer.policy
    rollout = policy.sample(["a red circle"], steps=2)
    rows = torch.zeros(1, dtype=torch.long)
    velocity = policy.velocity(rollout, rows, rows)
    assert velocity.requires_grad and torch.equal(velocity, rollout.trajectory.velocity[:, 0])
    assert trainer.accelerator.mixed_precision == "no" and policy.model is policy.network
