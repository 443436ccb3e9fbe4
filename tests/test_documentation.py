"""What README and docs show: commands and settings exist, commands of the shipped models run, and so does Python."""

import argparse
import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed.run
import typer
import yaml
from accelerate.commands.launch import launch_command_parser
from PIL import Image

from flowalign.app.cli.main import app, main
from flowalign.app.cli.reward_file import read
from flowalign.config import load, recipe
from flowalign.data import ASSETS
from flowalign.data.votes import Pair, Votes
from flowalign.registry import names
from flowalign.training import Trainer
from rewards.rules import JPEGSize
from rewards.shapes import draw, parse

ROOT = Path(__file__).parents[1]
FIRST = [ROOT / "README.md", ROOT / "docs/commands.md"]
"""Other pages look at runs that these train."""
PAGES = [*FIRST, *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page not in FIRST)]
NAMES = [page.name for page in PAGES]
PROGRAMS = ("flowalign", "python", "accelerate", "torchrun", "make", "pip")
RECORD = """
record() { printf '%s\\0' "$@"; printf '\\n\\0'; }
for program in flowalign python accelerate torchrun make pip; do
  eval "$program() { record $program \\"\\$@\\"; }"
done
grep() { :; }
mkdir -p runs/pairs
"""
SETTINGS = [
    "training.iterations=1",
    "training.prompts_per_iteration=2",
    "training.group_size=4",
    "training.updates_per_iteration=1",
    "training.previews=0",
    "evaluation.limit=2",
]
SMALLER = {
    "train": [*SETTINGS, "evaluation.samples_per_prompt=1"],
    "eval": ["--pictures", "1"],
    "watch": ["--pictures", "1"],
    "bench": ["--limit", "2", "--steps", "1"],
    "league": ["--budget", "forwards=50", "--pictures", "1", "--seeds", "1", *(f"--set={s}" for s in SETTINGS[1:])],
    "search": ["--budget", "forwards=40"],
    "train-reward": ["--model", "tiny_clip", "--epochs", "1"],
    "prompts": ["--count", "8", "--heldout", "4"],
    "compare": ["--again", "--pictures", "1"],
    "pairs": ["--limit", "1", "--per-prompt", "2", "--steps", "2"],
}
PLACES = {
    "RUN": "runs/tiny_lm-gspo-seed0",
    "runs/one": "runs/tiny_sd3-dense_grpo-seed0",
    "runs/two": "runs/tiny_sd3-demo-seed0",
}
ELSEWHERE = re.compile(
    r"Qwen|black-forest-labs|configs/(sd3|flux|qwen_vl)/(?!\S+ --dry-run$)|tiny_sd3/{|--serve"
    r"|^demo|^plan|text_better|runs/sd3-|(gallery|train) runs/round|gallery runs/strengths|mine\.txt|my_run\.yaml"
    r"|^train sd(15|3)/|^bench (?!tiny_sd3|runs/tiny)"
    r"|runs/(drawn|tiny_sd3-sft|pairs|guided|heldout|started|sifted|listening|direct|few-)|rollout\.(workers|engine)"
    r"|\.yaml \S*think|tiny_vlm/judge|name=example-|runs/example-"
    r"|tiny_emu3/|sums_pairs|^pair-strengths|^prompts (sums|formulas|segments)"
    r"|tiny_lm/(dflow_grpo|text_outcome|gkd|text_ppo|hinted|self_distilled)"
    r"|^(power|probe|forecast|strength|soup|rewards|judge|verify-rollout|prompts (audit|decontaminate)) "
    r"|^league (?!\S*flow_grpo.yaml \S*single_step.yaml --world)"
)
"""large models and their plans (tools/test_plan.py), servers (training/engines), rollout workers
(training/test_workers.py), the demos (cli/test_demo*.py), instruments (cli/test_power.py and others) and their example
(test_worked_example.py), files of the reader, what hours of training make, and leagues but for one in another world: in
their own they are run in training/test_league.py, and their recipes run dry (planning/test_dry_run.py)"""


def blocks(page: Path, *languages: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text for language, text in fenced if language in languages]


def commands(page: Path, folder: Path) -> list[list[str]]:
    """The words of every command line of a page, as bash reads them."""
    shown = [
        block for block in blocks(page, "", "bash") if re.search(rf"^(\w+=\S+ )?({'|'.join(PROGRAMS)}) ", block, re.M)
    ]
    done = subprocess.run(["bash", "-euc", RECORD + "".join(shown)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split("\0") for line in done.stdout.split("\0\n\0")[:-1]]
    return [[word for word in words if word != "..."] for words in lines]


def check_flowalign(words: list[str]) -> None:
    """Read as the command line reads it, and every configuration with what is set in it."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    values = command.make_context(command.name, words).params
    given = [*values.values(), *(values.get("configs") or ())]
    for path in map(str, given):
        if path.startswith("configs/"):
            config = load(ROOT / path, values.get("overrides") or values.get("set_") or [])
            if Path(str(config.data.prompts)).suffix != ".jsonl":
                config.check(processes=1)


def check_script(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Read by the script's own parser, which then stops."""

    class Read(Exception):
        pass

    def stop(read: Callable[..., Any]) -> Callable[..., Any]:
        def reading(*arguments: Any) -> None:
            raise Read(read(*arguments))

        return reading

    def run(function: Callable[..., Any]) -> None:
        script = typer.Typer()
        script.command()(function)
        raise Read(typer.main.get_command(script).make_context(words[0], words[1:]))

    parser = argparse.ArgumentParser
    with monkeypatch.context() as patch, pytest.raises(Read):
        for name in ("parse_args", "parse_intermixed_args"):
            patch.setattr(parser, name, stop(getattr(parser, name)))
        patch.setattr(typer, "run", run)
        patch.setattr(sys, "argv", words)
        patch.syspath_prepend(ROOT / "scripts")
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")


def anchors(page: Path) -> set[str]:
    """What links to a page's headings are called."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_the_files_and_headings_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    folders = "samplers|rewards|flowalign|configs|scripts|tests|docs"
    named = [(ROOT / path, "") for path in re.findall(rf"`((?:{folders})/[\w./-]*)`", text)]
    linked = re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text)
    for path, anchor in [*named, *((page.parent / path if path else page, anchor) for path, anchor in linked)]:
        assert path.exists(), path
        assert not anchor or anchor in anchors(path), f"{path.name}#{anchor}"


@pytest.mark.parametrize("name", NAMES)
def test_commands_and_their_options_exist(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for program, *words in commands({page.name: page for page in PAGES}[name], folder):
        told = f"{name}: {shlex.join([program, *words])}"
        try:
            if program in ("accelerate", "torchrun"):
                launch = torch.distributed.run.get_args_parser() if program == "torchrun" else launch_command_parser()
                launched = launch.parse_args(words[program == "accelerate" :])
                assert launched.module and launched.training_script == "flowalign", told
                if getattr(launched, "config_file", None):
                    assert (ROOT / launched.config_file).is_file(), told
                program, words = "flowalign", launched.training_script_args
            if program == "flowalign":
                check_flowalign(words)
            elif program == "python":
                check_script(words, monkeypatch)
            elif program == "make":
                subprocess.run(["make", "-n", *words], cwd=ROOT, check=True, capture_output=True)
            elif program == "pip":
                # PyPI's flowalign is another project; with an extra, the installed one is taken
                assert "flowalign" not in words and not {"-U", "--upgrade"} & set(words), told
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{told}: {error}") from error


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("sample RUN prompt --cout 8", "--cout"),
        ("smaple RUN prompt", "smaple"),
        ("train configs/tiny_sd3/nowhere.yaml", "nowhere"),
        ("train configs/tiny_sd3/demo.yaml training.iteratons=3", "iteratons"),
        ("league configs/tiny_sd3/demo.yaml --budget seconds=9 --set evaluation.limt=4", "limt"),
    ],
)
def test_what_does_not_exist_is_noticed(line: str, complaint: str) -> None:
    with pytest.raises(Exception, match=complaint):
        check_flowalign(line.split())


def test_an_option_that_a_script_does_not_have_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exception, match="--sampels"):
        check_script(["scripts/measure_ceiling.py", "--sampels", "4"], monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the documented commands run: with the recipes, and files as they name them."""
    place = tmp_path_factory.mktemp("documented")
    (place / "configs").symlink_to(ROOT / "configs")
    rng = np.random.default_rng(0)
    (place / PLACES["runs/one"] / "gallery").mkdir(parents=True)
    votes = Votes(place / PLACES["runs/one"] / "gallery/votes.sqlite")
    for i, text in enumerate(["a red circle", "a blue square", "two green triangles", "a yellow square"] * 25):
        sides = place / PLACES["runs/one"] / f"right{i}.png", place / PLACES["runs/one"] / f"wrong{i}.png"
        for side, shown in zip(sides, (text, "three purple circles"), strict=True):
            Image.fromarray(draw(parse(shown), rng)).save(side)
        votes.add("Ada", Pair(f"pair{i}", text, str(i), *sides), "first")
    votes.export(place / "votes.jsonl")
    made = {"tag": "single_object", "include": [{"class": "bench", "count": 1}], "prompt": "a photo of a bench"}
    (place / "evaluation_metadata.jsonl").write_text(json.dumps(made) + "\n")
    for text in [text for page in PAGES for text in blocks(page, "python")]:
        if file := re.match(r"# (\w+\.py)\n", text):
            (place / file[1]).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.syspath_prepend(place)
        yield place


@pytest.fixture(scope="module")
def ran(folder: Path) -> dict[str, int | None]:
    """The exit code of every documented command that a laptop runs in seconds, made smaller, in the pages' order.

    A recipe is trained once; that others of its settings are valid shows `test_commands_and_their_options_exist`.
    """
    codes: dict[str, int | None] = {}
    trained: set[str] = set()
    for page in PAGES:
        for program, *words in commands(page, folder):
            line = shlex.join(words)
            if program != "flowalign" or line in codes or ELSEWHERE.search(line):
                continue
            if words[0] == "train":
                # a study's trainings are of recipes that run dry (planning/test_dry_run.py)
                if words[1] in trained or page.name == "long-runs.md":
                    continue
                trained.add(words[1])
            with pytest.raises(SystemExit) as left:
                main([*(PLACES.get(word, word) for word in words), *SMALLER.get(words[0], [])])
            codes[line] = left.value.code
    return codes


@pytest.mark.slow
def test_the_commands_of_the_shipped_models_run(ran: dict[str, int | None], folder: Path) -> None:
    assert not {line: code for line, code in ran.items() if code}
    names = {line.split()[0] for line in ran}
    assert names == {
        "train",
        "sample",
        "search",
        "eval",
        "watch",
        "bench",
        "league",
        "gallery",
        "train-reward",
        "list",
        "prompts",
        "pair-questions",
        "init",
        "recipes",
        "pairs",
        "config",
        "compare",
        "export",
    }
    assert len(ran) >= 18
    for made in (
        "comparison/index.html",
        "questions.jsonl",
        "geneval.jsonl",
        "runs/our-taste",
        "runs/league-relations/league.png",
    ):
        assert (folder / made).exists(), made


SNIPPETS = {
    # a model of the reader, and less of everything
    "iterations=20,": f"iterations=1, settings={dict(setting.split('=') for setting in SETTINGS[1:])},",
    "iterations=60,": "iterations=1,",
    '{"training.prompts_per_iteration": 32}': "{'training.prompts_per_iteration': 2, 'evaluation.limit': 2}",
    'prompts="shapes_heldout"': 'prompts=["a red circle", "two blue squares"]',
    # weights that are downloaded
    "Aesthetic()": "JPEGSize()",
}


@pytest.mark.parametrize(
    "page",
    # the example's is run with its commands (test_worked_example.py)
    [page for page in PAGES if blocks(page, "python") and page.name != "worked-example.md"],
    ids=lambda page: page.name,
)
def test_the_python_of_a_page_runs(
    page: Path, ran: dict[str, int | None], folder: Path, tiny_policy: Callable[..., Any]
) -> None:
    names: dict[str, Any] = {
        "__name__": "snippet",
        "pipe": tiny_policy().pipeline,
        "config": load(recipe("tiny_sd3/demo"), [*SETTINGS, "name=snippet"]),
        "Trainer": Trainer,
        "JPEGSize": JPEGSize,
    }
    for text in blocks(page, "python"):
        for shown, run in SNIPPETS.items():
            text = text.replace(shown, run)
        exec(compile(text, page.name, "exec"), names)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")], ids=lambda page: page.name)
def test_the_settings_of_a_page_exist(page: Path, folder: Path) -> None:
    for text in blocks(page, "yaml"):
        # a section may be shown in several forms
        for form in re.split(r"^(?=data: )", text, flags=re.MULTILINE) if text.startswith("data: ") else [text]:
            check_settings(yaml.safe_load(form) or {}, folder)


def check_settings(values: dict[str, Any], folder: Path) -> None:
    """Of a part of a training configuration, put into a recipe, or of a reward server's."""
    if "server" in values:
        (folder / "server.yaml").write_text(yaml.safe_dump(values))
        read(folder / "server.yaml")
        return
    text = {"environment", "model"} & values.keys() or "selection" in values.get("data", {})
    base = recipe("tiny_lm/grpo" if text else "tiny_sd3/flow_grpo")
    # of a training the rest is the recipe's
    training = {f"training.{key}": value for key, value in values.pop("training", {}).items()}
    values |= training
    load(base, [f"{key}={json.dumps(value)}" for key, value in values.items()])
    # whether they go together, with models and prompts that are here
    listed = (ASSETS / "prompts" / f"{values.get('data', {}).get('prompts')}.jsonl").is_file()
    elsewhere = ("model",) if listed else ("data", "model")
    shipped = [f"{key}={json.dumps(value)}" for key, value in values.items() if key not in elsewhere]
    load(base, [*shipped, f"evaluation.prompts={load(base).evaluation.prompts}"]).check(processes=1)


def test_the_readme_counts_methods_and_families() -> None:
    numbers = re.search(r"\[(\d+) methods\].* for \[(\d+) model families\]", (ROOT / "README.md").read_text())
    assert numbers is not None
    assert int(numbers[1]) == len(names("algorithms")) + len(names("searches"))
    assert int(numbers[2]) == len(names("models"))


def test_every_message_that_the_page_of_troubles_explains_is_said() -> None:
    rows = re.findall(r"^\| `(.+?)` \|", (ROOT / "docs" / "troubles.md").read_text(), re.MULTILINE)
    assert len(rows) > 30
    files = [file for package in ("flowalign", "rewards", "samplers") for file in (ROOT / package).rglob("*.py")]
    source = "\n".join(file.read_text() for file in files)
    assert [row for row in rows if row not in source] == []
