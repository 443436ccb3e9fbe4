"""scripts/tree_pairs.py: pairs that begin alike and of which the right one is chosen."""

import importlib.util
import json
from pathlib import Path

from flowalign.config import load, recipe
from flowalign.data.texts import TextPreferences

SCRIPT = Path(__file__).parents[2] / "scripts" / "tree_pairs.py"
SPEC = importlib.util.spec_from_file_location("tree_pairs", SCRIPT)
assert SPEC is not None and SPEC.loader is not None
script = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(script)


def test_both_texts_of_a_pair_begin_alike(tmp_path: Path) -> None:
    config = load(recipe("tiny_lm/grpo"), ["evaluation.batch_size=64", "evaluation.max_new_tokens=4"])
    file = script.tree_pairs(config, 12, tmp_path / "pairs.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        left, right = line["prompt"].rstrip("=").replace("-", "+-").split("+")
        assert int(line["chosen"]) == int(left) + int(right)
        assert line["chosen"].startswith(line["shared"]) and line["rejected"].startswith(line["shared"])
        assert line["chosen"] != line["rejected"]
    assert {len(line["shared"]) for line in lines} >= {0, 1}
    assert len(TextPreferences.read(str(file))) == 12
