"""scripts/judge_pairs.py: pairs of a model's own texts."""

import importlib.util
from pathlib import Path

import pytest

from flowalign.config import load, recipe
from flowalign.data import Prompts
from rewards import as_reward

SCRIPT = Path(__file__).parents[2] / "scripts" / "judge_pairs.py"
SPEC = importlib.util.spec_from_file_location("judge_pairs", SCRIPT)
assert SPEC is not None and SPEC.loader is not None
script = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(script)


def test_the_best_right_text_is_preferred_to_the_worst_of_all() -> None:
    assert script.chosen_pair([1, 1, 0, 0], [0.2, 0.9, 0.8, 0.1], 0.5) == (1, 3)
    # a judge that likes a wrong text does not make it right, and one that dislikes a right one tells right ones apart
    assert script.chosen_pair([0, 1, 1], [0.9, 0.3, 0.1], 0.5) == (1, 0)
    assert script.chosen_pair([1, 1, 1], [0.9, 0.3, 0.5], 0.5) == (0, 1)
    # nothing right, or nothing to choose
    assert script.chosen_pair([0, 0], [0.9, 0.3], 0.5) == script.chosen_pair([1, 1], [0.5, 0.5], 0.5) == (None, None)


def test_pairs_are_lines_of_preferences(tmp_path: Path) -> None:
    sampled = ["evaluation.batch_size=64", "evaluation.max_new_tokens=4", "evaluation.temperature=1"]
    config = load(recipe("tiny_lm/grpo"), sampled)
    short = as_reward(lambda texts, prompts: [-float(len(text)) for text in texts])
    made = script.judge_pairs(config, tmp_path / "p.jsonl", short, pairs=8)
    read = Prompts.read(str(made))
    assert len(read.texts) == 8
    for record in read.metadata:
        assert record["chosen"] == record["answer"]
        assert record["rejected"] != record["answer"] or len(record["rejected"]) > len(record["chosen"])
    few = load(recipe("tiny_lm/grpo"), [*sampled, "data.prompts=sums_heldout"])
    with pytest.raises(SystemExit, match="no prompt has a right text"):
        script.judge_pairs(few, tmp_path / "none.jsonl", texts=2, right=2.0, passes=1)
