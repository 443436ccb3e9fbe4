"""Checkpoints are whole or absent."""

import json
import os
import tracemalloc
from pathlib import Path

import pytest
import torch

from flowalign.errors import ConfigError, FlowalignError
from flowalign.runs.checkpoint import Checkpoints, _sum_of, optimizer_state, optimizer_tensors
from flowalign.runs.lock import locked
from flowalign.runs.metrics import MetricsFile


def save(checkpoints: Checkpoints, iteration: int) -> None:
    tensors = {"trainable": {"w": torch.full((2,), float(iteration))}}
    checkpoints.save(iteration, tensors, {"iteration": iteration}, lambda folder: (folder / "extra").touch())


def test_what_is_saved_is_loaded_and_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert checkpoints.all() == []
    for iteration in (8, 9, 10):
        save(checkpoints, iteration)
    assert [path.name for path in checkpoints.all()] == ["checkpoint-000009", "checkpoint-000010"]
    tensors, state = checkpoints.load(checkpoints.all()[-1])
    assert torch.equal(tensors["trainable"]["w"], torch.full((2,), 10.0)) and state == {"iteration": 10}
    assert len(list(checkpoints.folder.iterdir())) == 2


class Crash(BaseException):
    """Nothing catches it."""


@pytest.mark.parametrize("function", ["replace", "fsync"])
@pytest.mark.parametrize("calls", range(6))
def test_a_save_cut_short_leaves_whole_checkpoints_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, calls: int
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 1)
    save(checkpoints, 2)
    own, made = getattr(os, function), 0

    def crash(*arguments: object) -> None:
        nonlocal made
        if made == calls:
            raise Crash
        made += 1
        own(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(os, function, crash)
        try:
            save(checkpoints, 3)
            crashed = False
        except Crash:
            crashed = True
    assert crashed or made <= calls
    for path in checkpoints.all():
        tensors, state = checkpoints.load(path)
        assert path.name == f"checkpoint-{state['iteration']:06d}"
        assert torch.equal(tensors["trainable"]["w"], torch.full((2,), float(state["iteration"])))
        assert (path / "extra").exists()
    assert checkpoints.all()[-1].name in ("checkpoint-000002", "checkpoint-000003")
    # the next save goes through and clears what was left
    save(checkpoints, 4)
    assert checkpoints.all()[-1].name == "checkpoint-000004"
    assert all(path.name.startswith("checkpoint-") for path in tmp_path.iterdir())


def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    for iteration in (1, 2, 3):
        save(checkpoints, iteration)
    older, newest = checkpoints.all()[-2:]
    kept = {path.name: path.read_bytes() for path in newest.iterdir()}
    assert kept.keys() == {"trainable.safetensors", "state.json", "extra", "checksums.json"}
    for name, whole in kept.items():
        flipped = bytes([whole[0] ^ 1]) + whole[1:] if whole else b"1"
        for content in (None, b"", whole[: len(whole) // 2], flipped, whole + b" "):
            if content == whole:
                continue
            (newest / name).unlink(missing_ok=True)
            if content is not None:
                (newest / name).write_bytes(content)
            caplog.clear()
            # another process finds it
            found = Checkpoints(tmp_path, keep=3)
            if name == "checksums.json" and content == whole + b" ":
                assert found.newest() == newest  # which says the same
                continue
            assert found.newest() == older and found.newest(until=1) == found.all()[0]
            [message] = {record.getMessage() for record in caplog.records}
            assert message.startswith(f"{newest} is damaged ({name}") and "going on from checkpoint-000002" in message
        (newest / name).unlink()
        (newest / name).mkdir()
        assert Checkpoints(tmp_path, keep=3).newest() == older and f"({name}: " in caplog.text
        (newest / name).rmdir()
        (newest / name).write_bytes(whole)
    assert Checkpoints(tmp_path, keep=3).newest() == newest


def test_a_damaged_checkpoint_does_not_push_a_whole_one_out(tmp_path: Path) -> None:
    for iteration in (1, 2, 3):
        save(Checkpoints(tmp_path, keep=3), iteration)
    checkpoints = Checkpoints(tmp_path, keep=2)
    (checkpoints.all()[-1] / "state.json").unlink()
    checkpoints.newest()
    save(checkpoints, 4)
    assert [path.name for path in checkpoints.all()] == ["checkpoint-000002", "checkpoint-000004"]
    for path in checkpoints.all():
        (path / "extra").unlink()
    with pytest.raises(FlowalignError, match=r"every checkpoint .* \(checkpoint-000004: extra: missing; checkpoint-0"):
        checkpoints.newest()


def test_weights_that_are_not_finite_are_neither_saved_nor_gone_on_from(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 1)
    broken = {"optimizer": {"0.exp_avg": torch.tensor([0.0, float("inf")])}}
    with pytest.raises(FlowalignError, match=r"iteration 2: '0.exp_avg' \(optimizer\) is not finite"):
        checkpoints.save(2, broken, {})
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001"]
    checkpoints.save(2, {"replay": broken["optimizer"]}, {})
    os.rename(checkpoints.all()[-1] / "replay.safetensors", checkpoints.all()[-1] / "ema.safetensors")
    written = checkpoints.all()[-1] / "checksums.json"
    sums = {name.replace("replay", "ema"): value for name, value in json.loads(written.read_text())["files"].items()}
    written.write_text(json.dumps({"files": sums, "all": _sum_of(sums)}))
    assert checkpoints.newest() == checkpoints.all()[0]


def test_checkpoints_are_in_order_beyond_a_million_and_readable(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    for iteration in (999_998, 1_000_000, 999_999):
        save(checkpoints, iteration)
    assert [path.name[11:] for path in checkpoints.all()] == ["999998", "999999", "1000000"]
    assert checkpoints.newest(until=999_999) == checkpoints.all()[1]
    assert {path.stat().st_mode & 0o777 for path in checkpoints.all()[0].iterdir()} == {0o644}


def test_a_disk_that_takes_nothing_is_one_line(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(FlowalignError, match=r"checkpoint-000001 cannot be written: .*earlier checkpoints stay"):
        save(checkpoints, 1)


def test_a_half_written_folder_is_not_a_checkpoint(tmp_path: Path) -> None:
    for name in (".partial-checkpoint-000009", ".removed-checkpoint-000007", "checkpoint-", "checkpoint-000009.tmp"):
        (tmp_path / name).mkdir()
    assert Checkpoints(tmp_path, keep=1).all() == []


def test_optimizer_states_survive_the_way_through_flat_tensors() -> None:
    parameters = [torch.nn.Parameter(torch.randn(3)) for _ in range(12)]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, betas=(0.8, 0.9))
    sum((p**2).sum() for p in parameters).backward()
    optimizer.step()
    state = optimizer.state_dict()
    again = optimizer_state(*optimizer_tensors(state))
    assert again["param_groups"] == state["param_groups"]
    assert again["state"].keys() == state["state"].keys()
    for index, values in state["state"].items():
        for key, value in values.items():
            assert torch.equal(again["state"][index][key], value)


def test_metrics_cut_short_by_a_crash_are_left_out_and_continued(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    assert metrics.read() == []
    for iteration in range(3):
        metrics.append({"iteration": iteration, "x": 0.5})
    with open(metrics.path, "a") as file:
        file.write('{"iteration": 3, "x"')
    assert [record["iteration"] for record in metrics.read()] == [0, 1, 2]
    metrics.keep_before(2)
    assert metrics.path.read_text().count("\n") == 2
    metrics.append({"iteration": 2, "x": 1.0})
    assert [record["x"] for record in metrics.read()] == [0.5, 0.5, 1.0]


def test_a_long_file_of_metrics_is_not_held_in_memory(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    lines = [json.dumps({"iteration": i, "reward/mean": 0.5, "note": "x" * 500}) + "\n" for i in range(5_000)]
    metrics.path.write_text("".join(lines))
    tracemalloc.start()
    metrics.keep_before(4_999)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # of 2.7 MB
    assert peak < 200_000
    assert metrics.path.read_text() == "".join(lines[:-1])


def test_a_folder_is_trained_in_by_one_process_at_a_time(tmp_path: Path) -> None:
    again = pytest.raises(ConfigError, match=f"is being trained by process {os.getpid()}")
    with locked(tmp_path / "run"), again, locked(tmp_path / "run"):
        pass
    with locked(tmp_path / "run"):
        pass


def test_moments_that_share_their_code_book_are_each_written() -> None:
    """As bitsandbytes' of 8 bits do on a CPU; safetensors writes no tensor twice."""
    book = torch.rand(256)
    moments = {"state": {i: {"state1": torch.zeros(4), "qmap1": book} for i in range(2)}, "param_groups": []}
    tensors, rest = optimizer_tensors(moments)
    assert len({value.data_ptr() for value in tensors.values()}) == 4
    assert torch.equal(optimizer_state(tensors, rest)["state"][1]["qmap1"], book)
