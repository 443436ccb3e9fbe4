"""docs/worked-example.md: its commands run one after the other, made smaller; every instrument has a call."""

import importlib
import re
import runpy
import sys
from pathlib import Path

import pytest

from flowalign.app.cli.main import main
from tests.test_documentation import ROOT, SETTINGS, blocks, commands

PAGE = ROOT / "docs/worked-example.md"
FEWEST = ["training.group_size=2", "rollout.steps=3", "rollout.sigmas=null"]
SMALLER = {
    "prompts": [],
    "rewards": ["--prompts", "6", "--samples", "4"],
    "judge": ["--prompts", "2", "--draws", "2"],
    "probe": ["--iterations", "1", "--prompts", "2", "--samples", "2", *SETTINGS, *FEWEST],
    "train": [*SETTINGS, "training.group_size=2", "evaluation.samples_per_prompt=2"],
    "watch": ["--pictures", "1"],
    "strength": ["--strengths", "0,1", "--pictures", "1"],
    "soup": ["--pictures", "1", "--steps", "1"],
    "bench": ["--limit", "2", "--steps", "1"],
}
SAID = {
    "prompts audit": "near duplicates",
    "rewards calibrate": '"weight": ',
    "judge reliability": "wording",
    "probe": "verdict: ",
    "forecast": "cannot tell",
    "power": "seed",
    "watch": "score card: ",
    "strength": "highest reward at strength",
    "soup": "front",
    "bench": "unsafe",
    "gallery": "preferences: ",
}
"""What a command prints in any case; with two points a forecast cannot tell."""
WORDING = """
source: shapes_show in other words
answer: probability
questions:
  - name: shows
    ask: 'Does this picture show {prompt}? Answer yes or no.'
    labels: ["yes", "no"]
"""


@pytest.mark.slow
def test_the_commands_of_the_page_run_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(ROOT / "configs")
    (judge,) = (text for text in blocks(PAGE, "yaml") if text.startswith("# judge.yaml"))
    Path("judge.yaml").write_text(judge)
    Path("shows_that.yaml").write_text(WORDING)
    said = set()
    for program, *words in commands(PAGE, tmp_path):
        if program == "python":
            smaller = ["--pairs", "4"] if "label_pairs" in words[0] else ["--votes", "9"]
            monkeypatch.setattr(sys, "argv", [*words, *smaller])
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")
            assert capsys.readouterr().out
            continue
        with pytest.raises(SystemExit) as left:
            main([*words, *SMALLER.get(words[0], [])])
        printed = capsys.readouterr()
        if words[0] == "compare":
            # the two runs were judged by other rewards
            assert left.value.code == 2 and "different protocols (rewards" in printed.err
            continue
        # 1: a run that gamed its reward, a gate that does not open
        assert left.value.code in (0, None) or (words[0] in ("watch", "bench") and left.value.code == 1), printed.err
        if "--fit" in words:
            assert printed.out.startswith("fitted to its own samples: ")
            continue
        name = next((name for name in SAID if " ".join(words).startswith(name)), None)
        if name is not None and "--out" not in words:
            assert SAID[name] in printed.out, (words, printed.out)
            said.add(name)
    assert said == set(SAID)
    exec(compile(blocks(PAGE, "python")[0], PAGE.name, "exec"), {})
    for made in ("film.png", "strength.png", "votes.jsonl", "runs/example-mixed", "runs/example-strengths/slider.json"):
        assert Path(made).exists(), made


def test_every_instrument_has_a_call_that_exists() -> None:
    """The table of docs/instruments.md: a row for each, with its command, its call and its seconds."""
    text = (ROOT / "docs/instruments.md").read_text()
    rows = re.findall(r"^\| .*\| `(flowalign\.[\w.]+)` \| (\S.*) \|$", text, re.MULTILINE)
    assert len(rows) >= 14
    for name, cost in rows:
        module, _, attribute = name.rpartition(".")
        try:
            owner = importlib.import_module(module)
        except ModuleNotFoundError:
            module, _, kind = module.rpartition(".")
            owner = getattr(importlib.import_module(module), kind)
        assert callable(getattr(owner, attribute)), name
        assert re.match(r"[\d.,]+", cost), cost
