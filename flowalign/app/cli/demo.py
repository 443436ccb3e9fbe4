"""`flowalign demo`: align a shipped tiny model, measure it on held-out prompts, end on the gallery."""

import contextlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from flowalign.app.gallery import build, save_samples
from flowalign.config import Config, load, recipe
from flowalign.data import Prompts
from flowalign.errors import ConfigError
from flowalign.evaluation.scores import Evaluated, evaluate
from flowalign.runs.files import write_atomically
from flowalign.training import Trainer

EVALUATION_SEED = 700_000_000
"""First seed of the start noises of the figures; no setting was tuned on them."""

CURVE = 20
"""Iterations between two points of a short demo's curve of held-out scores."""


class _Climb(Trainer):
    """A trainer that updates the page after every evaluation."""

    def evaluate(self) -> Evaluated | None:
        result = super().evaluate()
        if self.main:
            build([self.folder], self.folder.parent / "gallery")
        return result


def run_demo(
    seeds: int,
    json_path: Path | None,
    folder: Path,
    iterations: int | None,
    pictures: int,
    console: Console,
    text: bool = False,
    long: bool = False,
) -> None:
    """Train once for each seed; print how the scores of held-out prompts change, write the figures and the gallery.

    Of several processes all train and measure, and the first one prints and writes.

    Args:
        folder: folder for the runs and the gallery.
        pictures: fewest pictures of the trained categories that are measured before and after, and half as many of the
            others; 600 have a standard error of 2 points.
        text: train the language model on sums, instead of Stable Diffusion 3 on its prompts.
        long: train for 18 times as many iterations, and update the page after every evaluation.

    Raises:
        ConfigError: `long` with `text`.
    """
    if text and long:
        raise ConfigError("--long is of pictures; leave out --text, or give --iterations")
    runs: list[dict[str, Any]] = []
    for seed in range(seeds):
        begin, worked = time.perf_counter(), time.process_time()
        overrides = [f"training.seed={seed}", f"output={folder}", f"name=seed{seed}"]
        overrides += [f"training.iterations={iterations}"] if iterations is not None else []
        # the page compares before with after; the evaluations between them are its curve
        overrides += [] if text else ["evaluation.save_samples=0"]
        overrides += [] if text or long else [f"evaluation.every={CURVE}"]
        name = "tiny_lm/demo" if text else "tiny_sd3/long_flow_grpo" if long else "tiny_sd3/demo"
        trainer = (_Climb if long else Trainer)(load(recipe(name), overrides))
        console.quiet = not trainer.main
        figures = _train_on_sums(trainer) if text else _train_on_pictures(trainer, console, pictures)
        of_all = trainer.processes.gather_objects([time.process_time() - worked])
        seconds = {"seconds": time.perf_counter() - begin, "processor_seconds": sum(of_all)}
        runs.append({"seed": seed} | figures | seconds)
        (_print_sums if text else _print_pictures)(console, runs[-1])
    if not trainer.main:
        return
    if json_path is not None:
        write_atomically(json_path, json.dumps({"runs": runs}, indent=2) + "\n")
    page = build([folder / f"seed{run['seed']}" for run in runs], folder / "gallery")
    console.print(f"before and after: {page.resolve()}", soft_wrap=True)


@dataclass
class DemoScores:
    """Held-out scores of the trained categories, and of the others."""

    trained: Evaluated
    others: Evaluated

    def means(self) -> dict[str, dict[str, float]]:
        """Per category, with the overall means under 'trained' and 'others'."""
        trained, others = self.trained.means(), self.others.means()
        totals = {"trained": trained.pop("all"), "others": others.pop("all")}
        return {**trained, **others, **totals}

    def save(self, run: Path, iteration: int) -> None:
        """Put the measured pictures into the run's folder, where they replace those of the trainer."""
        samples = []
        for evaluated in (self.trained, self.others):
            lines, per_prompt = evaluated.lines(), evaluated.prompts.count(evaluated.prompts[0])
            # the first picture of every prompt, then the second of every prompt
            samples += [sample for first in range(per_prompt) for sample in lines[first::per_prompt]]
        save_samples(run, iteration, samples)


def measure(trainer: Trainer, pictures: int) -> DemoScores:
    """Score the weights that a run saves, always with the same prompts, start noises, steps and guidance."""
    assert isinstance(trainer.config, Config)
    settings = trainer.config.evaluation
    trained = trainer.config.data.where["category"]
    heldout = Prompts.read(settings.prompts or "")
    categories = sorted({record["category"] for record in heldout.metadata})
    results = []
    others = [name for name in categories if name not in trained]
    for number, (kept_categories, fewest) in enumerate(((trained, pictures), (others, pictures // 2))):
        prompts = Prompts.read(settings.prompts or "", {"category": kept_categories})
        each, seed = -(-fewest // len(prompts)), EVALUATION_SEED + number * 10_000_000
        judge, processes = trainer.evaluator.reward, trainer.processes
        with trainer.learner.averaged():
            result = evaluate(trainer.policy, judge, prompts, settings, each, seed, processes)
        # the page shows the pictures of all processes
        made = processes.gather_objects(list(zip(result.rows, result.samples, strict=True)))
        rows, samples = zip(*sorted(made, key=lambda row: row[0]), strict=True)
        results.append(replace(result, rows=list(rows), samples=list(samples)))
    return DemoScores(*results)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Within it torch has one thread: the operations of so small a network are slower when threads divide them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@_one_thread()
def _train_on_pictures(trainer: Trainer, console: Console, pictures: int) -> dict[str, Any]:
    console.print("measuring the base model on held-out prompts")
    begin = time.perf_counter()
    first = measure(trainer, pictures)
    if trainer.main:
        first.save(trainer.folder, 0)
        page = build([trainer.folder], trainer.folder.parent / "gallery")
        console.print(f"what it makes of them: {page.resolve()}", soft_wrap=True)
        if isinstance(trainer, _Climb):
            console.print(f"the curve as it goes: {page.resolve().as_uri()}#curves", soft_wrap=True)
    seconds = time.perf_counter() - begin
    console.print(
        f"now it trains; when the bar below is full, the same is measured again, in about {seconds:.0f} s more"
    )
    trainer.train()
    last = measure(trainer, pictures)
    if trainer.main:
        first.save(trainer.folder, 0)
        last.save(trainer.folder, trainer.iteration)
    before, after = first.means(), last.means()
    figures: dict[str, Any] = {"trained_on": sorted({record["category"] for record in first.trained.metadata})}
    for score in ("strict", "soft"):
        for label, prefix in (("trained", ""), ("others", "others_")):
            figures[f"{prefix}{score}_before"] = before[label][score]
            figures[f"{prefix}{score}_after"] = after[label][score]
    figures["pictures"] = before["trained"]["samples"]
    figures["others_pictures"] = before["others"]["samples"]
    figures["categories"] = {name: {"before": before[name], "after": after[name]} for name in before}
    return figures


def _print_pictures(console: Console, run: dict[str, Any]) -> None:
    rows = []
    for name, row in run["categories"].items():
        # one trained category is all that was trained on
        if name == "trained" and len(run["trained_on"]) == 1:
            continue
        before, after = row["before"], row["after"]
        label = {"trained": "all trained on", "others": "all others"}.get(name, name)
        label += " (trained)" if name in run["trained_on"] else ""
        strict = [f"{before['strict']:.1%} -> {after['strict']:.1%}", _points(before["strict"], after["strict"])]
        soft = f"{before['soft']:.3f} -> {after['soft']:.3f}"
        rows.append([label, str(before["samples"]), *strict, soft])
    names = ("prompts", "pictures", "strict", "gain", "soft")
    _print(console, f"Held-out prompts, seed {run['seed']}, {run['seconds']:.0f} s", names, rows)


def _train_on_sums(trainer: Trainer) -> dict[str, Any]:
    trainer.train()
    evaluations = trainer.evaluator.lines.read()
    first, last = evaluations[0], evaluations[-1]
    names = [key.removesuffix("/reward") for key in first if key.endswith("/reward")]
    return {
        "exact_match_before": first["all/reward"],
        "exact_match_after": last["all/reward"],
        "texts": first["all/samples"],
        "curve": [[record["iteration"], record["all/reward"]] for record in evaluations],
        "categories": {n: {"before": first[f"{n}/reward"], "after": last[f"{n}/reward"]} for n in names},
    }


def _print_sums(console: Console, run: dict[str, Any]) -> None:
    took = f"{run['seconds']:.0f} s, {run['processor_seconds']:.0f} s of them computing"
    rows = []
    for name, row in run["categories"].items():
        before, after = row["before"], row["after"]
        rows.append([name, f"{before:.1%}", f"{after:.1%}", _points(before, after)])
    title = f"Exact match on {run['texts']} held-out sums, seed {run['seed']}, {took}"
    _print(console, title, ("sums", "before", "after", "gain"), rows)
    steps = "  ".join(f"{iteration}: {share:.1%}" for iteration, share in run["curve"])
    console.print(f"by iteration  {steps}", soft_wrap=True)


def _points(before: float, after: float) -> str:
    return f"{100 * (after - before):+.1f}"


def _print(console: Console, title: str, names: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(title=title)
    for number, name in enumerate(names):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
