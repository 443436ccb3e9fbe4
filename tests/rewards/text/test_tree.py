"""A tree of steps: its counts are those of the texts that it finished, and its lines what reward models learn from."""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rewards.text.model import CausalModel
from rewards.text.tree import StepNode, StepTree, TreeSearch, step_lines
from rewards.text.verifiers import ExactMatch

DIGITS = r"(?<=\d)(?=\d)"


class Counted(ExactMatch):
    """Right answers, and every text that was judged."""

    def __init__(self) -> None:
        super().__init__()
        self.judged: list[str] = []

    def __call__(self, samples: Sequence[str], prompts, metadata):  # type: ignore[no-untyped-def]
        self.judged += samples
        return super().__call__(samples, prompts, metadata)


def test_values_are_shares_of_the_texts_that_begin_so(model: CausalModel) -> None:
    outcome = Counted()
    search = TreeSearch(model, outcome, width=4, most=5, explore=0.5, separator=DIGITS)
    tree = search("17+25=", {"answer": "42"}, iterations=6)
    assert tree.root.visits == len(outcome.judged) > 4 and len(list(tree.root)) > 2
    for node in tree.root:
        # below it are the texts that were finished from its parent or from it, and whose first steps are its own
        below = sum(child.visits for child in node.children)
        assert node.visits >= below and 0 <= node.value <= 1
        assert not node.children or node.visits - below >= 1
    right = outcome.judged.count("42")
    assert tree.root.total == right and tree.right == (["42"] if right else [])
    first = next((i for i, text in enumerate(outcome.judged) if text == "42"), None)
    assert tree.iterations == (7 if first is None else first // 4 + 1)
    again = TreeSearch(model, ExactMatch(), width=4, most=5, explore=0.5, separator=DIGITS)
    assert [n.text for n in again("17+25=", {"answer": "42"}, 6).root] == [n.text for n in tree.root]


def test_what_cannot_be_solved_takes_all_iterations(model: CausalModel) -> None:
    search = TreeSearch(model, ExactMatch(), width=2, most=5, separator=DIGITS)
    assert search("1+1=", {"answer": "no number"}, 3).iterations == 4
    with pytest.raises(ValueError, match="temperature above 0"):
        TreeSearch(model, ExactMatch(), temperature=0)


def test_labels_are_kept_where_a_judge_agrees_and_weighed_with_a_tools_verdict() -> None:
    good = StepNode(text="4", visits=4, total=1, children=[StepNode(text="42", ended=True, visits=2, total=1)])
    tree = StepTree(
        root=StepNode(text="", children=[good, StepNode(text="3", visits=2, total=0)]), iterations=1, right=["42"]
    )
    lines = step_lines(tree, "17+25=")
    assert [(line["completion"], line["value"], line["label"]) for line in lines] == [
        ("4", 0.25, True),
        ("42", 0.5, True),
        ("3", 0.0, False),
    ]
    agreed = step_lines(tree, "17+25=", verdicts={"4": True, "42": False, "3": False})
    assert [line["completion"] for line in agreed] == ["4", "3"]
    good.check = 1.0
    assert next(line["value"] for line in step_lines(tree, "17+25=", weight=0.6)) == pytest.approx(0.6 + 0.4 * 0.25)


def test_the_script_writes_what_its_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "scripts")
    script = importlib.import_module("label_steps")
    judge = json.dumps({"name": "text_format", "pattern": r"\d+"})
    options = ["--iterations", "2", "--limit", "3", "--tokens", "5", "--separator", DIGITS, "--judge", judge]
    script.main(["tiny_lm", "sums_train", *options, "--output", str(tmp_path)])
    files = {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in tmp_path.iterdir()}
    assert {line["iterations"] for line in files["prompts"]} <= {1, 2, 3} and len(files["prompts"]) == 3
    assert "3 lines in" in capsys.readouterr().out
    # the judge finds numbers right, so that what is left leads to a right answer now and then
    assert all(line["label"] and line["value"] > 0 for line in files["steps"])
