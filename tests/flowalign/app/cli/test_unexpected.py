"""Errors that nobody foresaw, and numbers that are none: one line each."""

import inspect
import sys
from typing import Any

import pytest
import typer

from flowalign.app.cli import main as command_line
from flowalign.app.cli.main import app, main


def left(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit code of a command, and what it said on stderr."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().err


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """`flowalign recipes` fails as no code should, with much to say."""

    def recipes() -> None:
        raise KeyError("first line\nsecond line " + 5_000_000 * "x")

    monkeypatch.setattr("flowalign.config.loader.recipes", recipes)


def test_an_unexpected_error_is_one_readable_line(broken: None, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = left(capsys, "recipes")
    assert code == 70 and said.count("\n") == 1 and len(said) < 2100
    assert said.startswith("flowalign: KeyError: 'first line") and "please open an issue" in said


def test_its_place_and_what_to_do_are_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("flowalign.config.loader.recipes", lambda: [].pop())
    code, said = left(capsys, "recipes")
    assert code == 70 and "test_unexpected.py, line" in said
    assert "please open an issue" in said and "--traceback" in said and "Traceback" not in said
    for arguments in (["recipes", "--traceback"], ["--traceback", "recipes"]):
        code, said = left(capsys, *arguments)
        assert code == 70 and "Traceback (most recent call last)" in said and said.count("pop from empty list") == 2


def test_a_line_stands_below_a_progress_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tqdm.auto import tqdm

    def recipes() -> None:
        monkeypatch.setattr(sys, "kept", tqdm(total=3, file=sys.stderr), raising=False)
        raise ValueError("in the middle")

    monkeypatch.setattr("flowalign.config.loader.recipes", recipes)
    assert "\nflowalign: ValueError: in the middle" in left(capsys, "recipes")[1]


def floats(command: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every option of every command that is a float, after the words of its command."""
    if hasattr(command, "commands"):
        return [found for name, inner in command.commands.items() for found in floats(inner, (*path, name))]
    asked = inspect.signature(command.callback).parameters
    options = [option for option in command.params if option.name in asked and option.opts[0].startswith("-")]
    return [(*path, option.opts[0]) for option in options if "float" in str(asked[option.name].annotation)]


@pytest.mark.parametrize("words", floats(typer.main.get_command(app)), ids=" ".join)
def test_no_option_takes_a_number_that_is_none(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    """`--guidance inf` sampled, and said nothing."""
    *command, option = words
    for text in ("inf", "nan"):
        code, said = left(capsys, *command, option, text, "a", "b")
        assert code == 2 and f"Invalid value for '{option}'" in said


@pytest.mark.parametrize("weight", ["nan", "inf", "tiny_sd3=-inf"])
def test_nor_does_rlg(capsys: pytest.CaptureFixture[str], weight: str) -> None:
    code, said = left(capsys, "sample", "tiny_sd3", "a red circle", "--rlg", weight)
    assert code == 2 and "give a weight such as 1.6" in said


def test_a_dry_runs_options_need_a_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    """`--full` alone trained."""
    assert "--dry-run --full" in left(capsys, "train", "tiny_sd3/flow_grpo", "--full")[1]
    assert "--dry-run starts no run" in left(capsys, "train", "tiny_sd3/flow_grpo", "--dry-run", "--resume")[1]
    assert command_line.UNEXPECTED == 70
