"""Prompts that a program makes have right answers, and documents are cut where sentences end."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from flowalign.app.cli.prompts import prompts
from flowalign.data import Prompts
from flowalign.data.procedural import formulas, holds, sums, value_of
from flowalign.data.segments import segments
from flowalign.errors import ConfigError

app = typer.Typer()
app.add_typer(prompts, name="prompts")


def test_sums_have_the_values_that_python_gives_them() -> None:
    records = sums(200, terms=4, digits=3, operators="+-*", seed=1)
    assert len({record["prompt"] for record in records}) == 200
    for record in records:
        numbers = record["prompt"].removesuffix("=")
        # numbers without leading zeros and three operators: python reads them as they are meant
        assert eval(numbers) == int(record["answer"])
    assert value_of([2, 3, 4], ["-", "*"]) == -10
    assert records == sums(200, 4, 3, "+-*", seed=1) != sums(200, 4, 3, "+-*", seed=2)
    with pytest.raises(ValueError, match="there are 200, and half"):
        sums(150, terms=2, digits=1, operators="+-")


def test_formulas_are_answered_by_trying_all_assignments() -> None:
    records = formulas(12, 3, 8, "count", seed=0)
    for record in records:
        by_hand = 0
        for x1 in (False, True):
            for x2 in (False, True):
                for x3 in (False, True):
                    values = {1: x1, 2: x2, 3: x3}
                    by_hand += all(any(values[abs(a)] is (a > 0) for a in clause) for clause in record["clauses"])
        assert str(by_hand) == record["answer"]
    assert {record["answer"] for record in formulas(40, 3, 14, "satisfiable")} == {"yes", "no"}
    assert holds([[1, -2, 3]], [False, True, True]) and not holds([[1, -2, 3]], [False, True, False])
    with pytest.raises(ValueError, match="from 3 to 12"):
        formulas(1, 13, 3, "count")


def test_documents_are_cut_where_sentences_end() -> None:
    text = "One. Two is here! Three?\nFour. Five."
    assert list(segments(text, sentences=2, context=1)) == [
        {"prompt": "One.", "answer": "Two is here! Three?"},
        {"prompt": "One. Two is here! Three?", "answer": "Four. Five."},
    ]


def test_the_commands_write_prompts(tmp_path: Path) -> None:
    def run(*arguments: str) -> Prompts:
        out = tmp_path / "out.jsonl"
        done = CliRunner().invoke(app, ["prompts", *arguments, "--output", str(out)])
        if done.exception is not None:
            raise done.exception
        return Prompts.read(str(out))

    assert len(run("sums", "--count", "20", "--terms", "3")) == 20
    assert run("formulas", "--count", "3", "--kind", "assignment").metadata[0]["kind"] == "assignment"
    (tmp_path / "documents.jsonl").write_text(json.dumps({"text": "A b. C d. E f."}) + "\n")
    documents = str(tmp_path / "documents.jsonl")
    assert run("segments", documents, "--context", "2").metadata == [{"answer": "E f."}]
    with pytest.raises(ConfigError, match="no document has 5 sentences"):
        run("segments", documents)
    with pytest.raises(ConfigError, match="'/' is not of"):
        run("sums", "--count", "1", "--operators", "/")
