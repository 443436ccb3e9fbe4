"""What `flowalign train` ends on."""

import logging
from pathlib import Path
from typing import Any

import pytest

from flowalign.app.cli.results import (
    Warnings,
    in_plain_diffusers,
    names_own_code,
    print_comparison,
    print_ending,
    print_verdict,
)
from flowalign.config import load, recipe
from flowalign.evaluation.comparison import Comparison
from flowalign.evaluation.scores import Evaluated
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
    # as it was trained, without the tokens that would stand for a missing text encoder
    assert ", max_sequence_length=0)" in text


def test_own_code_is_noticed_in_any_section() -> None:
    config = load(recipe("tiny_sd3/flow_grpo")).model_dump(exclude={"name"})
    assert not names_own_code(config)
    assert names_own_code(config | {"rewards": [{"name": "vivid.Vivid"}]})
    assert names_own_code(config | {"rollout": {"plan": {"name": "every_other:EveryOther"}}})


def test_the_lines_for_plain_diffusers_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    unseen = ["evaluation.prompts=null", "evaluation.panel=[]", "name=run"]
    Trainer(load(recipe("tiny_sd3/demo"), [*SMALL, *unseen]), progress=False).train()
    scope: dict[str, Any] = {}
    exec("\n".join(in_plain_diffusers("tiny_sd3", "runs/run/lora")), scope)
    assert scope["pipe"].get_active_adapters() == ["default_0"]


@pytest.mark.parametrize(
    ("gains", "said"),
    [([0.5, 0.4, 0.6, 0.5, 0.4], None), ([0.5, -0.4, 0.1, -0.5, 0.4], "contains 0"), ([-0.5, -0.4, -0.6], "FELL")],
)
def test_an_ending_without_a_gain_says_so(
    gains: list[float], said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [str(i) for i in range(len(gains))]
    common: Any = {"prompts": prompts, "metadata": [{}] * len(gains), "seeds": [0] * len(gains), "parts": {}}
    before, after = (Evaluated(**common, value=value, samples=[], rows=[]) for value in ([0.0] * len(gains), gains))
    print_verdict(Comparison({"before": before, "after": after}))
    text = capsys.readouterr().out
    assert said in text if said else text == ""


def test_a_category_that_all_samples_have_is_no_further_row(capsys: pytest.CaptureFixture[str]) -> None:
    for categories, rows in (["counting"] * 2, ["all"]), (["counting", "single"], ["all", "counting", "single"]):
        metadata = [{"category": category} for category in categories]
        shared: dict[str, Any] = {"prompts": ["a", "b"], "metadata": metadata, "seeds": [0, 1]}
        one, two = (
            Evaluated(**shared, value=values, parts={}, samples=[], rows=[]) for values in ([0.1, 0.2], [0.3, 0.4])
        )
        print_comparison(Comparison({"before": one, "after": two}), gain="gain")
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if " reward " in line] == rows
