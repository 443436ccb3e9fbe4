"""The nearest prompts are those of a search over all pairs; a verifier is consistent, and a blind reward is not."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from flowalign.errors import ConfigError

LINES = {
    "how many legs has a cat": "4",
    "how many legs has a bird": "2",
    "how many legs has an ant": "6",
    "name the capital of France": "Paris",
    "name the capital of Spain": "Madrid",
    "sing": "la",
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    return importlib.import_module("measure_consistency")


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in LINES.items()))
    return str(path)


def test_each_prompt_is_paired_with_the_one_most_like_it(script: ModuleType) -> None:
    prompts, answers = list(LINES), list(LINES.values())
    expected = []
    for i, prompt in enumerate(prompts):
        mine = set(prompt.lower().split())
        alike = {
            j: len(mine & set(other.lower().split())) / len(mine | set(other.lower().split()))
            for j, other in enumerate(prompts)
            if j != i
        }
        j = max(alike, key=lambda j: (alike[j], -j))
        if alike[j] >= 0.3:
            expected.append((i, j))
    assert script.nearest(prompts, answers, 0.3) == expected and len(expected) == 5


def test_lines_of_one_answer_are_no_pair(script: ModuleType) -> None:
    assert script.nearest(["two and two", "one and three"], ["4", "4"], 0.1) == []


@pytest.mark.parametrize(
    ("reward", "settings", "own", "gives"), [("exact_match", "{}", 100, 100), ("text_format", "{pattern: '.*'}", 0, 0)]
)
def test_the_shares_of_two_rewards(
    reward: str, settings: str, own: int, gives: int, script: ModuleType, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script.main(file, reward, settings, "answer", 0.3)
    printed = capsys.readouterr().out
    assert "5 of 6 prompts have a near one" in printed
    assert f"earns more: {own}.0%" in printed and f"gives more: {gives}.0%" in printed


def test_what_is_missing_is_one_line(script: ModuleType, file: str) -> None:
    with pytest.raises(ConfigError, match="no 'chosen' with the prompt 'how many legs has a cat'; --answer names"):
        script.main(file, "exact_match", "{}", "chosen", 0.3)
    with pytest.raises(ConfigError, match="no two prompts share 100% of their words"):
        script.main(file, "exact_match", "{}", "answer", 1.0)
