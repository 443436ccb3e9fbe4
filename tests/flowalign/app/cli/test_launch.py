"""Commands that start processes of their own; what `flowalign demo` makes in two is in tests/test_wheel.py."""

import multiprocessing
import os
import re
import sys
import threading
import time

import pytest
import torch

from flowalign.app.cli import launch


def test_a_command_takes_the_processors_of_a_cpu_unless_it_was_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert launch.free_processors(most=2) == 2 and launch.free_processors(most=16) == 8
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launch.free_processors(most=2) == 1
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert launch.free_processors(most=2) == 1


def test_what_all_processes_fail_by_is_said_once(capfd: pytest.CaptureFixture) -> None:
    assert launch.launch(2, ["train", "nowhere.yaml"]) == 2
    assert capfd.readouterr().err.count("nowhere.yaml") == 1


def test_a_killed_process_is_named(capfd: pytest.CaptureFixture) -> None:
    others = multiprocessing.active_children()  # e.g. the verifiers', of tests before

    def kill() -> None:
        while not (children := [child for child in multiprocessing.active_children() if child not in others]):
            time.sleep(0.01)
        children[0].kill()

    threading.Thread(target=kill).start()
    assert launch.launch(2, ["train", "nowhere.yaml"]) == 1
    assert re.search("process [01] of 2 was ended by SIGKILL", capfd.readouterr().err)


def test_what_another_process_alone_fails_by_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(launch.time, "sleep", lambda seconds: None)
    with pytest.raises(SystemExit):
        launch._run(1, 2, 29500, ["train", "nowhere.yaml"])
    assert "nowhere.yaml" in capsys.readouterr().err
