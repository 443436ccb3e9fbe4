"""What `flowalign train` ends on."""

import logging
from pathlib import Path

import pytest

from flowalign.app.cli.results import Warnings, print_ending
from flowalign.config import load, recipe
from flowalign.training import Trainer

SMALL = [
    "training.iterations=1",
    "training.prompts_per_iteration=2",
    "training.group_size=4",
    "training.updates_per_iteration=1",
    "training.previews=0",
    "evaluation.limit=4",
    "evaluation.panel=[{name: jpeg_size}]",
]


def test_the_ending_shows_reward_and_panel_in_80_columns_and_what_was_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    trainer = Trainer(load(recipe("tiny_sd3/demo"), [*SMALL, f"output={tmp_path}"]), progress=False)
    heard = Warnings()
    logging.getLogger().addHandler(heard)
    trainer.train()
    logging.getLogger("flowalign").warning("iteration 0 taught nothing")
    logging.getLogger().removeHandler(heard)
    print_ending(trainer, heard.messages)
    text = capsys.readouterr().out
    table = text.partition("more scores")[0].splitlines()
    assert all(len(line.rstrip()) <= 80 and "…" not in line for line in table)
    rows = [line.split() for line in table if "±" in line and "held-out" not in line]
    assert {score for row in rows for score in row[:2]} & {"reward", "panel/jpeg_size", "shapes"} == {
        "reward",
        "panel/jpeg_size",
    }
    # mean, ±, error of before, after and gain: nothing is broken into two lines
    assert all(row.count("±") == 3 and row[-1][0].isdigit() for row in rows)
    assert "more scores in evaluations.jsonl, such as global" in text
    assert "warning" in text and "taught nothing" in heard.messages[-1]
