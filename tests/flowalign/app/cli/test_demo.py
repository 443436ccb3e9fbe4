"""What `flowalign demo` leaves behind, and the shipped tiny language model; what the demo gains is in docs/demo.md."""

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from flowalign.app import gallery
from flowalign.app.cli import demo
from flowalign.app.cli.main import main
from flowalign.config import load
from flowalign.data import ASSETS, Prompts
from flowalign.errors import ConfigError
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.runs.metrics import MetricsFile

TINY = ASSETS / "tiny_lm"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """An iteration has eight pictures, so that it takes seconds."""
    small = ["evaluation.samples_per_prompt=1", "training.prompts_per_iteration=2", "training.group_size=4"]
    monkeypatch.setattr(demo, "load", lambda path, overrides: load(path, [*overrides, *small]))


def test_it_ends_on_a_gallery_of_the_pictures_that_were_measured(tmp_path: Path, short: None) -> None:
    console = Console(record=True, width=80)
    demo.run_demo(1, tmp_path / "demo.json", tmp_path / "runs", 1, 2, console)
    (run,) = json.loads((tmp_path / "demo.json").read_text())["runs"]
    page = tmp_path / "runs" / "gallery" / "index.html"
    printed = console.export_text()
    assert str(page) in printed.splitlines()[-1]
    rows = re.findall(r"^│ (.+?) +│ +\d+ │ +[\d.]+% -> [\d.]+% │", printed, re.M)
    assert rows == ["counting (trained)", "position", "single", "two_objects", "all others"]
    data = json.loads(re.search(r'id="data">(.*?)</script', page.read_text(), re.S)[1])
    assert data["columns"] == [[0, 0], [0, 1]] and not data["runs"][0]["notes"]
    assert len(data["rows"]) == run["pictures"] + run["others_pictures"]
    strict = data["scores"].index("strict")
    for column, when in ((0, "before"), (1, "after")):
        counting = [
            values[strict]
            for row, c, *_, values in data["pictures"]
            if c == column and data["rows"][row][2]["category"] == "counting"
        ]
        assert sum(counting) / len(counting) == pytest.approx(run[f"strict_{when}"])


def test_the_page_of_a_long_demo_follows_its_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: None
) -> None:
    built: list[list[int]] = []

    def build(runs: list[Path], output: Path) -> Path:
        lines = MetricsFile(runs[0] / "evaluations.jsonl").read()
        built.append([line["iteration"] for line in lines])
        return gallery.build(runs, output)

    monkeypatch.setattr(demo, "build", build)
    demo.run_demo(1, None, tmp_path / "runs", 1, 2, Console(quiet=True), long=True)
    # before training, after each evaluation, and at the end
    assert built == [[], [0], [0, 1], [0, 1]]
    with pytest.raises(ConfigError, match="--text"):
        demo.run_demo(1, None, tmp_path / "text", 1, 2, Console(quiet=True), text=True, long=True)


def test_the_shipped_model_is_small_and_knows_half_of_its_sums() -> None:
    assert sum(file.stat().st_size for file in TINY.rglob("*") if file.is_file()) < 5e6
    policy = LanguagePolicy.from_pretrained(TINY)
    prompts = Prompts.read("sums_heldout").spread(300)
    made = policy.decode(policy.sample(prompts.texts, list(range(300)), max_new_tokens=5, batch_size=300))
    right = sum(text == record["answer"] for text, record in zip(made, prompts.metadata, strict=True)) / 300
    stored = json.loads((TINY / "quality.json").read_text())["exact_match"]
    # a standard error of 0.03
    assert right == pytest.approx(stored, abs=0.12)


def test_no_heldout_sum_is_trained_on() -> None:
    heldout, train = Prompts.read("sums_heldout"), Prompts.read("sums_train")
    assert not set(heldout.texts) & set(train.texts)
    for prompts in (heldout, train):
        for text, record in zip(prompts.texts, prompts.metadata, strict=True):
            assert str(eval(text.rstrip("="))) == record["answer"]  # of digits and signs only


def test_the_demo_measures_before_and_after_and_writes_figures(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    figures = tmp_path / "figures.json"
    main_without_exit(
        ["demo", "--text", "--iterations", "2", "--output", str(tmp_path / "runs"), "--json", str(figures)]
    )
    (run,) = json.loads(figures.read_text())["runs"]
    assert run["texts"] == 1000 and 0 <= run["exact_match_before"] <= 1
    assert {"all", "addition", "subtraction"} == set(run["categories"])
    assert [iteration for iteration, _ in run["curve"]] == [0, 2]
    assert "Exact match on 1000 held-out sums" in capsys.readouterr().out
    assert (tmp_path / "runs" / "gallery" / "index.html").is_file()
    sampled = tmp_path / "runs" / "seed0" / "samples" / "iteration-000002" / "samples.jsonl"
    assert {"text", "prompt", "reward"} <= set(json.loads(sampled.read_text().splitlines()[0]))
    for arguments in (["eval", str(tmp_path / "runs" / "seed0")], ["sample", str(tmp_path / "runs" / "seed0"), "1+1="]):
        main_without_exit(arguments)
    assert "'1+1=' -> '" in capsys.readouterr().out


@pytest.mark.slow
def test_training_raises_the_exact_match_on_sums_never_seen(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    main_without_exit(
        ["demo", "--text", "--iterations", "30", "--output", str(tmp_path / "runs"), "--json", str(figures)]
    )
    (run,) = json.loads(figures.read_text())["runs"]
    # the two shares have standard errors of 0.016; the demo's 250 iterations gain three times as much
    assert run["exact_match_after"] > run["exact_match_before"] + 0.04


def main_without_exit(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert not left.value.code
