"""What the fuzzer found stays mended, and a few cases of each kind go as they should."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "fuzz.py"
SPEC = importlib.util.spec_from_file_location("fuzz", SCRIPT)
assert SPEC is not None and SPEC.loader is not None
fuzz = sys.modules["fuzz"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(fuzz)
CORPUS = [json.loads(line) for line in Path(__file__).with_name("fuzz.jsonl").read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def place() -> Iterator[None]:
    with fuzz.workplace():
        yield


@pytest.mark.parametrize("found", CORPUS, ids=lambda found: f"{found['kind']}-{found['seed']}")
def test_what_was_found_stays_mended(place: None, found: dict) -> None:
    assert fuzz.attempt(found["kind"], found["case"]) is None


@pytest.mark.parametrize("kind", fuzz.TRIES)
def test_a_few_of_each_kind(place: None, kind: str) -> None:
    counts = fuzz.fuzz([kind], range(-10, 0), 60, 20, None)
    assert counts[kind]["as it should"] >= 8 and not counts[kind]["fault"]


def test_a_case_is_made_from_its_seed_alone() -> None:
    for make, _ in fuzz.TRIES.values():
        first, again = (json.dumps(make(fuzz.random.Random("commands 7"))) for _ in range(2))
        assert first == again


def test_a_fault_is_found(place: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An error of our own is a fault, and stands in the corpus once; one that people are told of is none."""
    assert fuzz.attempt("commands", ["train", "nowhere"]) is None
    monkeypatch.setattr("flowalign.config.loader.recipes", lambda: [].pop())
    assert "pop from empty list" in (fuzz.attempt("commands", ["recipes"]) or "")
    monkeypatch.setitem(fuzz.TRIES, "rewards", (lambda rng: ["recipes"], fuzz.try_command))
    counts = fuzz.fuzz(["rewards"], range(3), 60, 20, tmp_path / "found.jsonl")
    assert counts["rewards"]["fault"] == 3 and len((tmp_path / "found.jsonl").read_text().splitlines()) == 1
