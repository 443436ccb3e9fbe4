"""Checkpoints are whole or absent."""

import os
from pathlib import Path

import pytest
import torch

from flowalign.runs.checkpoint import Checkpoints, optimizer_state, optimizer_tensors
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
    metrics.append({"iteration": 2, "x": 1.0})
    assert [record["x"] for record in metrics.read()] == [0.5, 0.5, 1.0]
