"""scripts/judge_pairs.py: pairs of a model's own texts, and the loop of GRPO, pairs and DPO."""

import importlib.util
import json
from pathlib import Path

from flowalign.config import load, recipe
from flowalign.training import Trainer
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


def test_grpo_pairs_and_dpo_follow_each_other(tmp_path: Path) -> None:
    small = ["training.iterations=1", "training.checkpoint_every=1", "evaluation.every=0", "evaluation.prompts=null"]
    first = [*small, "training.prompts_per_iteration=4", "training.micro_batch_size=32", f"output={tmp_path}", "name=a"]
    Trainer(load(recipe("tiny_lm/grpo"), first), progress=False).train()
    model = f"model.path={tmp_path / 'a' / 'model'}"
    sampled = ["evaluation.batch_size=64", "evaluation.max_new_tokens=4", "evaluation.temperature=1"]
    short = as_reward(lambda texts, prompts: [-float(len(text)) for text in texts])
    made = script.judge_pairs(load(recipe("tiny_lm/grpo"), [model, *sampled]), tmp_path / "p.jsonl", short, pairs=8)
    lines = [json.loads(line) for line in made.read_text().splitlines()]
    assert len(lines) == 8
    for line in lines:
        assert line["chosen"] == line["answer"]
        assert line["rejected"] != line["answer"] or len(line["rejected"]) > len(line["chosen"])
    second = [model, *small, f"data.prompts={made}", "training.prompts_per_iteration=8", f"output={tmp_path}", "name=b"]
    Trainer(load(recipe("tiny_lm/text_dpo"), second), progress=False).train()
    assert (tmp_path / "b" / "model").is_dir()
