"""`flowalign demo --text`: teach the shipped tiny language model its sums by GRPO, measured on sums it never saw."""

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flowalign.config import load, recipe
from flowalign.runs.files import write_atomically
from flowalign.training import Trainer


def run_text_demo(
    seeds: int, json_path: Path | None, output: Path | None, iterations: int | None, console: Console
) -> None:
    """Train once a seed; print how the held-out exact match climbs, and write the figures."""
    folder = output or Path("runs") / time.strftime("demo-text-%Y%m%d-%H%M%S")
    runs: list[dict[str, Any]] = []
    for seed in range(seeds):
        begin, worked = time.perf_counter(), time.process_time()
        overrides = [f"training.seed={seed}", f"output={folder}", f"name=seed{seed}"]
        overrides += [f"training.iterations={iterations}"] if iterations is not None else []
        trainer = Trainer(load(recipe("tiny_lm/demo"), overrides))
        trainer.train()
        seconds = {"seconds": time.perf_counter() - begin, "processor_seconds": time.process_time() - worked}
        runs.append(_figures(seed, trainer.evaluator.lines.read()) | seconds)
        _print(console, runs[-1])
        console.print(f"texts: {(trainer.folder / 'samples').resolve()}", soft_wrap=True)
    if json_path is not None:
        write_atomically(json_path, json.dumps({"runs": runs}, indent=2) + "\n")


def _figures(seed: int, evaluations: list[dict[str, Any]]) -> dict[str, Any]:
    first, last = evaluations[0], evaluations[-1]
    names = [key.removesuffix("/reward") for key in first if key.endswith("/reward")]
    return {
        "seed": seed,
        "exact_match_before": first["all/reward"],
        "exact_match_after": last["all/reward"],
        "texts": first["all/samples"],
        "curve": [[record["iteration"], record["all/reward"]] for record in evaluations],
        "categories": {n: {"before": first[f"{n}/reward"], "after": last[f"{n}/reward"]} for n in names},
    }


def _print(console: Console, run: dict[str, Any]) -> None:
    took = f"{run['seconds']:.0f} s, {run['processor_seconds']:.0f} s of them computing"
    table = Table(title=f"Exact match on {run['texts']} held-out sums, seed {run['seed']}, {took}")
    table.add_column("sums")
    for name in ("before", "after", "gain"):
        table.add_column(name, justify="right")
    for name, row in run["categories"].items():
        gain = 100 * (row["after"] - row["before"])
        table.add_row(name, f"{row['before']:.1%}", f"{row['after']:.1%}", f"{gain:+.1f}")
    console.print(table)
    steps = "  ".join(f"{iteration}: {share:.1%}" for iteration, share in run["curve"])
    console.print(f"by iteration  {steps}", soft_wrap=True)
