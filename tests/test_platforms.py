"""What would fail on Windows or a Mac, read from the source."""

import ast
import builtins
import os
from pathlib import Path

import pytest
import torch

from flowalign.runs.files import sync
from rewards.vision import pick_device

ROOT = Path(__file__).parents[1]
FILES = [file for package in ("flowalign", "rewards", "samplers") for file in (ROOT / package).rglob("*.py")]


def texts_without_encoding(source: str) -> list[int]:
    """Lines that read or write a text in the system's own encoding."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or any(keyword.arg == "encoding" for keyword in node.keywords):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("read_text", "write_text"):
            lines.append(node.lineno)
        elif isinstance(node.func, ast.Name) and node.func.id == "open":
            mode = node.args[1] if len(node.args) > 1 else ast.Constant("r")
            if not (isinstance(mode, ast.Constant) and "b" in str(mode.value)):
                lines.append(node.lineno)
    return lines


def test_every_text_file_is_utf8() -> None:
    assert texts_without_encoding("open('x')\nopen('x', 'rb')\np.write_text(s)\np.read_text(encoding='utf-8')") == [
        1,
        3,
    ]
    assert {str(file): lines for file in FILES if (lines := texts_without_encoding(file.read_text("utf-8")))} == {}


def test_what_is_made_to_last_is_opened_for_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows refuses fsync on a handle that only reads."""
    (tmp_path / "file").write_text("kept")
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
    opened = builtins.open
    modes: list[str] = []
    monkeypatch.setattr(builtins, "open", lambda path, mode, *more: modes.append(mode) or opened(path, mode, *more))
    sync(tmp_path)
    assert synced[0] == str(tmp_path / "file") and modes == ["r+b"]
    assert (tmp_path / "file").read_text() == "kept"


def test_no_file_needs_a_module_of_unix_to_be_imported() -> None:
    for file in FILES:
        top = [node for node in ast.parse(file.read_text("utf-8")).body if isinstance(node, ast.Import)]
        names = {alias.name for node in top for alias in node.names}
        assert not names & {"fcntl", "resource", "pwd", "grp", "termios"}, file


def test_a_macs_gpu_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    assert pick_device("auto") == torch.device("mps", 0) and pick_device("cpu") == torch.device("cpu")
