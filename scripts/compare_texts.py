"""What the methods for language models reach with one and the same budget on the tiny model's sums, as a table.

    python scripts/compare_texts.py --forwards 15000                   # every recipe of configs/tiny_lm that does sums
    python scripts/compare_texts.py configs/tiny_lm/{grpo,gspo}.yaml

The budget is of texts that the model goes through, sampled or scored again; what a reward asks a model about does not
count. The learning rate falls to 0 with the budget. Held-out sums are answered by samples at temperature 1.
"""

import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from flowalign.config import load
from flowalign.runs.metrics import MetricsFile
from flowalign.training import Trainer

RECIPES = Path(__file__).parents[1] / "configs" / "tiny_lm"


def measured(recipe: Path, forwards: int, seed: int) -> dict[str, Any]:
    """Exact match on the held-out sums before and after, iterations, and seconds of processor."""
    with tempfile.TemporaryDirectory() as folder:
        config = load(
            recipe,
            [
                f"output={folder}",
                f"training.seed={seed}",
                f"training.budget.forwards={forwards}",
                "training.checkpoint_every=0",
                "training.previews=0",
                "evaluation.every=0",
                "evaluation.rewards=[{name: exact_match}]",
            ],
        )
        begin = time.process_time()
        trainer = Trainer(config, progress=False)
        trainer.train()
        lines = MetricsFile(trainer.folder / "evaluations.jsonl").read()
        return {
            "before": lines[0]["all/reward"],
            "after": lines[-1]["all/reward"],
            "iterations": trainer.iteration,
            "seconds": time.process_time() - begin,
        }


def main(
    recipes: Annotated[list[Path] | None, typer.Argument()] = None,
    forwards: Annotated[int, typer.Option(min=1)] = 15_000,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    sums = [path for path in sorted(RECIPES.glob("*.yaml")) if load(path).evaluation.prompts == "sums_heldout"]
    rows = []
    for recipe in recipes or sums:
        made = measured(recipe, forwards, seed)
        rows.append((made["after"], recipe.stem, made))
        print(recipe.stem, made, flush=True)
    print("\n| recipe | before | after | iterations | processor |\n| --- | ---: | ---: | ---: | ---: |")
    for _, name, made in sorted(rows, key=lambda row: (-row[0], row[1])):
        figures = f"{made['before']:.1%} | {made['after']:.1%} | {made['iterations']} | {made['seconds']:.0f} s"
        print(f"| `{name}` | {figures} |")


if __name__ == "__main__":
    typer.run(main)
