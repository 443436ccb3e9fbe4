"""What the methods for language models reach with one and the same budget on the tiny model's sums, as a table.

    python scripts/compare_texts.py --forwards 15000 --seeds 3         # every recipe of configs/tiny_lm that does sums
    python scripts/compare_texts.py configs/tiny_lm/{grpo,gspo}.yaml

The budget is of texts that the model goes through, sampled or scored again; what a reward asks a model about does not
count. The learning rate falls to 0 with the budget. Held-out sums are answered by samples at temperature 1, before and
after from the same random numbers; intervals of the gain are of the sums, each with all seeds.
"""

import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from flowalign.config import load
from flowalign.evaluation.scores import Evaluated, scores_of
from flowalign.evaluation.statistics import significance
from flowalign.training import Trainer

RECIPES = Path(__file__).parents[1] / "configs" / "tiny_lm"


def measured(recipe: Path, forwards: int, seed: int) -> dict[str, Any]:
    """Each held-out sum's gain by exact match, the mean before, iterations, and seconds of processor."""
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
        before, after = (Evaluated.read(scores_of(trainer.folder, at)) for at in (0, trainer.iteration))
        return {
            "sums": before.prompts,
            "gains": [late - early for early, late in zip(before.value, after.value, strict=True)],
            "before": fmean(before.value),
            "iterations": trainer.iteration,
            "seconds": time.process_time() - begin,
        }


def row(recipe: Path, forwards: int, seeds: int) -> tuple[float, str]:
    """The mean gain of several seeds, and the table's line."""
    runs = [measured(recipe, forwards, seed) for seed in range(seeds)]
    gains = [gain for run in runs for gain in run["gains"]]
    interval = significance(gains, [prompt for run in runs for prompt in run["sums"]])
    assert interval is not None, "the recipes have a thousand held-out sums"
    mean = fmean(gains)
    each = ", ".join(f"{100 * fmean(run['gains']):+.1f}" for run in runs)
    between = f"{100 * interval.low:+.1f} to {100 * interval.high:+.1f}"
    spent = f"{runs[0]['iterations']} | {fmean(run['seconds'] for run in runs):.0f} s"
    return mean, f"| `{recipe.stem}` | {runs[0]['before']:.1%} | {100 * mean:+.1f} ({between}) | {each} | {spent} |"


def main(
    recipes: Annotated[list[Path] | None, typer.Argument()] = None,
    forwards: Annotated[int, typer.Option(min=1)] = 15_000,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0, 1 and so on.")] = 3,
) -> None:
    sums = [path for path in sorted(RECIPES.glob("*.yaml")) if load(path).evaluation.prompts == "sums_heldout"]
    rows = []
    for recipe in recipes or sums:
        rows.append(row(recipe, forwards, seeds))
        print(rows[-1][1], flush=True)
    print("\n| recipe | before | gain (95% interval) | seeds | iterations | processor |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    print("\n".join(line for _, line in sorted(rows, key=lambda row: (-row[0], row[1]))))


if __name__ == "__main__":
    typer.run(main)
