"""Whether recipes of pictures end higher or lower when they train for several times as long, as a table.

    python scripts/compare_lengths.py configs/tiny_sd3/{flow_grpo,nft}.yaml --times 4 --seeds 3 --output runs/lengths

Schedules are stretched with the length. Held-out prompts are judged after the last iteration alone, from the start
noises of the leagues, and by the last weights, also where a recipe keeps the best. Runs that are finished in the
folder are not trained again, and one that was cut off goes on.
"""

import json
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated

import typer

from flowalign.config import load
from flowalign.runs.files import write_atomically
from flowalign.training import Trainer
from flowalign.training.league import judge


def strict(recipe: Path, times: int, seed: int, output: Path, pictures: int, changed: list[str]) -> float:
    """Share of held-out pictures that meet every requirement, or the mean reward where a reward has no such share."""
    name = f"{recipe.stem}-x{times}-seed{seed}"
    done = output / name / "lengths.json"
    if not done.is_file():
        iterations = load(recipe, changed).training.iterations * times
        same = [f"output={output}", f"name={name}", f"training.seed={seed}", f"training.iterations={iterations}"]
        same += ["evaluation.every=0", "training.previews=0"]
        same += ["evaluation.watch.keep_best=false", "evaluation.watch.early_stop=null"]
        trainer = Trainer(load(recipe, changed + same), resume=(done.parent / "checkpoints").is_dir(), progress=False)
        trainer.train()
        write_atomically(done, json.dumps(judge(trainer, None, pictures)))
    figures = json.loads(done.read_text(encoding="utf-8"))
    return float(figures["strict"] if "strict" in figures else figures["reward"])


def line(recipe: Path, times: int, once: list[float], longer: list[float]) -> str:
    """The table's line; 'lower' is below by more than the seeds of either length differ by."""
    gains = [late - early for early, late in zip(once, longer, strict=True)]
    spread = max(stdev(once), stdev(longer)) if len(once) > 1 else 0.0
    told = "lower" if fmean(gains) < -spread else "higher" if fmean(gains) > spread else "within the spread"
    cells = [", ".join(f"{100 * value:.1f}" for value in values) for values in (once, longer)]
    return f"| `{recipe.stem}` | {cells[0]} | {cells[1]} | {100 * fmean(gains):+.1f} | {told} |"


def main(
    recipes: list[Path],
    times: Annotated[int, typer.Option(min=2, help="How many times as long.")] = 4,
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    first_seed: Annotated[int, typer.Option(min=0)] = 0,
    pictures: Annotated[int, typer.Option(min=1, help="Pictures of each held-out prompt.")] = 12,
    output: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/lengths"),
    changed: Annotated[list[str] | None, typer.Option("--set", help="A setting of every run.")] = None,
) -> None:
    print(f"| recipe | its length, by seed | {times} times that | mean gain | it ends |")
    print("| --- | ---: | ---: | ---: | --- |")
    for recipe in recipes:
        each = [
            [strict(recipe, length, seed, output, pictures, changed or []) for length in (1, times)]
            for seed in range(first_seed, first_seed + seeds)
        ]
        print(line(recipe, times, [once for once, _ in each], [longer for _, longer in each]), flush=True)


if __name__ == "__main__":
    typer.run(main)
