"""`flowalign demo`: align the shipped tiny Stable Diffusion 3, measure it on held-out prompts, end on the gallery."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flowalign.config import load, recipe
from flowalign.data import Prompts
from flowalign.gallery import build, save_samples
from flowalign.runs.files import write_atomically
from flowalign.training import Trainer
from flowalign.training.evaluation import Evaluated, evaluate

EVALUATION_SEED = 700_000_000
"""of the start noises that the figures are measured on; nothing was tuned on them"""
PICTURES = 600
"""at least, for the trained categories and again for the others: a standard error of about 2 points"""


@dataclass
class Measured:
    """Held-out scores: of the categories that are trained on, and of the others."""

    trained: Evaluated
    others: Evaluated

    def means(self) -> dict[str, dict[str, float]]:
        """Per category, with the overall means under 'trained' and 'others'."""
        trained, others = self.trained.means(), self.others.means()
        totals = {"trained": trained.pop("all"), "others": others.pop("all")}
        return {**trained, **others, **totals}

    def save(self, run: Path, iteration: int) -> None:
        """Put the pictures that were measured into the run's folder, in the place of those the trainer saved."""
        samples = []
        for part in (self.trained, self.others):
            listed, of_one = part.samples(), part.prompts.count(part.prompts[0])
            # the first picture of every prompt, then the second of every prompt
            samples += [sample for first in range(of_one) for sample in listed[first::of_one]]
        save_samples(run, iteration, samples)


def measure(trainer: Trainer) -> Measured:
    """Score the present weights: always the same prompts, start noises, steps and guidance."""
    settings = trainer.config.evaluation
    trained = trainer.config.data.where["category"]
    heldout = Prompts.read(settings.prompts or "")
    categories = sorted({record["category"] for record in heldout.metadata})
    results = []
    for part, keep in enumerate((trained, [name for name in categories if name not in trained])):
        prompts = Prompts.read(settings.prompts or "", {"category": keep})
        pictures = -(-PICTURES // len(prompts))
        results.append(
            evaluate(
                trainer.policy,
                trainer.evaluator.reward,
                prompts,
                settings,
                pictures,
                EVALUATION_SEED + part * 10_000_000,
            )
        )
    return Measured(*results)


def run_demo(seeds: int, json_path: Path | None, output: Path | None, iterations: int | None, console: Console) -> None:
    """Train once a seed; print the table, write the figures and the gallery."""
    folder = output or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    runs: list[dict[str, Any]] = []
    for seed in range(seeds):
        begin = time.perf_counter()
        overrides = [f"training.seed={seed}", f"output={folder}", f"name=seed{seed}"]
        overrides += [f"training.iterations={iterations}"] if iterations is not None else []
        trainer = Trainer(load(recipe("tiny_sd3/demo"), overrides))
        console.print(f"[bold]Seed {seed}[/bold]: measuring the base model on held-out prompts")
        before = measure(trainer)
        trainer.train()
        after = measure(trainer)
        seconds = time.perf_counter() - begin
        before.save(trainer.folder, 0)
        after.save(trainer.folder, trainer.iteration)
        runs.append(_figures(seed, before.means(), after.means(), seconds))
        _print(console, runs[-1])
    if json_path is not None:
        write_atomically(json_path, json.dumps({"runs": runs}, indent=2) + "\n")
    page = build([folder / f"seed{run['seed']}" for run in runs], folder / "gallery")
    console.print(f"before and after: {page.resolve()}", soft_wrap=True)


def _figures(
    seed: int, before: dict[str, dict[str, float]], after: dict[str, dict[str, float]], seconds: float
) -> dict[str, Any]:
    figures: dict[str, Any] = {"seed": seed}
    for score in ("strict", "soft"):
        for label, prefix in (("trained", ""), ("others", "others_")):
            figures[f"{prefix}{score}_before"] = before[label][score]
            figures[f"{prefix}{score}_after"] = after[label][score]
    figures["pictures"] = before["trained"]["samples"]
    figures["others_pictures"] = before["others"]["samples"]
    figures["seconds"] = seconds
    figures["categories"] = {name: {"before": before[name], "after": after[name]} for name in before}
    return figures


def _print(console: Console, run: dict[str, Any]) -> None:
    table = Table(title=f"Held-out prompts, seed {run['seed']}, {run['seconds']:.0f} s")
    table.add_column("prompts")
    for name in ("pictures", "strict before", "strict after", "gain", "soft before", "soft after"):
        table.add_column(name, justify="right")
    for name, row in run["categories"].items():
        before, after = row["before"], row["after"]
        if name == "trained":
            table.add_section()
        table.add_row(
            {"trained": "all trained on", "others": "all others"}.get(name, name),
            str(before["samples"]),
            f"{before['strict']:.1%}",
            f"{after['strict']:.1%}",
            f"{100 * (after['strict'] - before['strict']):+.1f}",
            f"{before['soft']:.3f}",
            f"{after['soft']:.3f}",
        )
    console.print(table)
