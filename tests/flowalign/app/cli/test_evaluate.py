"""What `train` ends on, `eval` of several runs, and `watch`."""

import contextlib
import io
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from flowalign.app.cli.evaluate import labels_of
from flowalign.app.cli.main import main
from flowalign.config import recipe
from flowalign.evaluation.scores import Evaluated
from flowalign.runs.metrics import MetricsFile

SMALL = [
    *("training.iterations=1", "training.prompts_per_iteration=2", "training.group_size=4", "training.previews=0"),
    *("training.updates_per_iteration=1", "evaluation.limit=4", "training.optimizer.learning_rate=0.02"),
]


def said(*arguments: str, code: int = 0) -> str:
    """What a command prints, spaces and lines of tables aside."""
    with contextlib.redirect_stdout(io.StringIO()) as file, pytest.raises(SystemExit) as left:
        main(list(arguments))
    assert (left.value.code or 0) == code
    return " ".join(file.getvalue().replace("│", " ").split())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder with two runs, and what they printed."""
    folder = tmp_path_factory.mktemp("runs")
    words = ["train", str(recipe("tiny_sd3/flow_grpo")), *SMALL, f"output={folder}"]
    return folder, {
        name: said(*words, f"name={name}", "training.seed=" + str("onetwo".index(name))) for name in ("one", "two")
    }


@pytest.mark.parametrize(
    ("runs", "labels"),
    [
        (["runs/one", "others/two"], ["one", "two"]),
        (["runs/a/seed0", "runs/b/seed0"], ["a", "b"]),
        (["runs/a/seed0", "runs/b/seed0", "runs/b/seed1"], ["a/seed0", "b/seed0", "b/seed1"]),
        (["runs/x", "runs/x/x"], ["runs/x", "runs/x/x"]),
    ],
)
def test_runs_are_told_apart_by_what_differs(runs: list[str], labels: list[str]) -> None:
    assert labels_of([Path(run) for run in runs]) == labels


def test_a_training_ends_on_held_out_scores_and_what_to_do_next(runs: tuple[Path, dict[str, str]]) -> None:
    folder, printed = runs[0] / "one", runs[1]["one"]
    first, last = (record["all/reward"] for record in MetricsFile(folder / "evaluations.jsonl").read())
    assert first != last
    kept = [Evaluated.read(folder / "scores" / f"iteration-00000{i}.jsonl") for i in (0, 1)]
    assert [sum(own.value) / len(own.value) for own in kept] == pytest.approx([first, last])
    assert "8 samples of 4 held-out prompts" in printed
    assert f"all reward {first:.3f} ± " in printed and f" {last - first:+.3f} ± " in printed
    assert f"lora: {folder / 'lora'}" in printed and f"flowalign gallery {folder} --serve" in printed
    # the panel is suggested before, and its command after
    assert printed.startswith("no evaluation.panel: ") and printed.count("{name: tiny_clip}") == 1
    assert f"flowalign watch {folder} --panel tiny_clip" in printed


def test_runs_are_compared_on_other_prompts_by_other_rewards(runs: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    one, two = (str(runs[0] / name) for name in ("one", "two"))
    (tmp_path / "own.txt").write_text("two red circles\none blue square\nthree green triangles\n")
    (tmp_path / "judges.yaml").write_text("rewards: [{name: jpeg_size}]\n")
    words = ["--prompts", str(tmp_path / "own.txt"), "--pictures", "2", "--steps", "3", "--seed", "5"]
    words += ["--rewards", str(tmp_path / "judges.yaml"), "--panel", "tiny_clip"]
    printed = said("eval", one, two, "--base", *words, "--json", str(tmp_path / "made.json"))
    assert printed.count("sampled with steps 3") == 3 and f"{one} before training: " in printed
    made = json.loads((tmp_path / "made.json").read_text())
    assert (made["samples"], made["prompts"], made["compared_with"]) == (6, 3, "base")
    means = {name: row["all"] for name, row in made["means"].items()}
    assert list(means) == ["base", "one", "two"] and set(means["one"]) == {"reward", "panel/tiny_clip"}
    for name in ("one", "two"):
        gain = made["differences"][name]["all"]["panel/tiny_clip"]
        assert gain["mean"] == pytest.approx(
            means[name]["panel/tiny_clip"]["mean"] - means["base"]["panel/tiny_clip"]["mean"]
        )
        assert gain["mean"] and f"{gain['mean']:+.3f} ±" in printed
    # one run alone is its own measure
    alone = said("eval", two, *words[:-2])
    assert f"all reward {means['two']['reward']['mean']:.3f} ± {means['two']['reward']['error']:.3f}" in alone


def test_the_base_of_a_run_that_is_evaluated_with_a_weaker_lora_has_no_lora_to_weigh(
    runs: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    run = shutil.copytree(runs[0] / "one", tmp_path / "weaker")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["evaluation"] |= {"rlg": 0.7}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    _, before, after = re.split("sampled with", said("eval", str(run), "--base", "--pictures", "1"))
    assert "rlg" not in before and "rlg 0.7" in after


def test_a_run_is_watched_afterwards(
    runs: tuple[Path, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(runs[0] / "one")
    words = ["watch", run, "--panel", "tiny_clip", "--json", str(tmp_path / "made.json")]
    assert "no sign of reward hacking" in said(*words)
    assert json.loads((tmp_path / "made.json").read_text())["verdict"] == "good"
    scores = [
        Evaluated(
            prompts=["a", "b"],
            metadata=[{}, {}],
            seeds=[0, 1],
            value=value,
            parts={"panel/tiny_clip": panel},
            samples=[],
            rows=[],
        )
        for value, panel in (([0.0, 0.01], [0.9, 0.91]), ([0.9, 0.91], [0.0, 0.01]))
    ]
    monkeypatch.setattr("flowalign.app.cli.evaluate._evaluate", lambda *_, trained, **__: scores[trained])
    assert "hacking: the reward rises while tiny_clip falls" in said(*words, code=1)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["watch", "{run}"], "--panel: name a reward to watch by, e.g. tiny_clip"),
        (["eval", "{run}", "--rewards", "shaps"], "did you mean 'shapes'"),
        (["eval", "{run}", "--prompts", "nowhere.txt"], "no prompts at 'nowhere.txt'"),
        (["eval", "{run}", "--rewards", "exact_match"], "'exact_match' scores texts"),
        (["eval", "{run}", "--json", "."], "--json: . is a folder"),
    ],
)
def test_what_cannot_be_compared_is_known_before_the_work(
    runs: tuple[Path, dict[str, str]], capsys: pytest.CaptureFixture[str], words: list[str], hint: str
) -> None:
    said(*(word.format(run=runs[0] / "one") for word in words), code=2)
    assert hint in capsys.readouterr().err
