"""What `flowalign train` says before it begins and when it is done, and tables of scores."""

import logging
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from flowalign.runs.result import Result

if TYPE_CHECKING:
    from flowalign.config import BaseConfig
    from flowalign.evaluation.comparison import Comparison
    from flowalign.training import Trainer

PANEL = ("image_reward", "pick_score", "clip_score")
"""Rewards to watch a run by that is not trained on them."""


def suggested(config: "BaseConfig") -> list[str]:
    """Names of rewards to watch a run by that has no panel; none where it makes texts."""
    if config.evaluation.panel or config.evaluation.prompts is None or config.model.kind != "pictures":
        return []
    trained = {entry.name for entry in config.rewards}
    # in the world of shapes a judge of photographs is lost
    return ["tiny_clip"] if "shapes" in trained else [name for name in PANEL if name not in trained]


def suggest_panel(config: "BaseConfig") -> None:
    """Say what a panel is for, before a run begins that has none."""
    for name in suggested(config)[:1]:
        print(
            "no evaluation.panel: a reward that is not trained on shows when the one that is gets gamed, e.g. "
            f"evaluation.panel='[{{name: {name}}}]'"
        )


class Warnings(logging.Handler):
    """Keeps what a run warned of, to say at its end."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def print_ending(trainer: "Trainer", warnings: Sequence[str] = ()) -> None:
    """The held-out scores before and after, what was warned of, where the result is, and what can be done with it."""
    config = trainer.config
    gain = trainer.evaluator.gain()
    if gain is not None:
        panel = [name for name in next(iter(gain.results.values())).parts if name.startswith("panel/")]
        print_comparison(gain, "gain", ["reward", *panel])
    if warnings:
        count = "1 warning" if len(warnings) == 1 else f"{len(warnings)} warnings"
        print(f"{count} on the way, first: {warnings[0]}")
    result = Result(trainer.folder)
    print(f"run folder: {result.folder}")
    if result.lora is not None:
        print(f"lora: {result.lora}")
    run, prompt = shlex.quote(str(result.folder)), shlex.quote(trainer.prompts.texts[0])
    commands = [f"gallery {run} --serve", f"sample {run} {prompt} --count 4"]
    if config.evaluation.prompts is not None:
        commands.append(f"eval {run} --base --pictures 8")
    commands += [f"watch {run} --panel {name}" for name in suggested(config)[:1]]
    print("next:", *(f"flowalign {command}" for command in commands), sep="\n  ")


def print_comparison(comparison: "Comparison", gain: str | None = None, scores: Sequence[str] | None = None) -> None:
    """A table, a row a score: its mean in every evaluation, and the paired differences to the first.

    Args:
        gain: the heading of the difference, where there is one.
        scores: names of those to print, others are counted; default all.
    """
    first, *others = comparison.results
    samples = comparison.results[first].prompts
    title = f"{len(samples)} samples of {len(set(samples))} held-out prompts, ± standard error"
    # no lines between columns: the ending of a run fits 80 columns
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("prompts")
    table.add_column("score")
    for heading in (first, *others, *([gain] if gain else [f"{name} - {first}" for name in others])):
        table.add_column(heading, justify="right")
    above, left_out = "", set()
    for row in comparison.rows():
        if scores is not None and row.score not in scores:
            left_out.add(row.score)
            continue
        if above and row.prompts != above:
            table.add_section()
        means = ["" if own is None else f"{own}" for own in row.means]
        gains = ["" if own is None else f"{own:+}" for own in row.differences]
        table.add_row("" if row.prompts == above else row.prompts, row.score, *means, *gains)
        above = row.prompts
    Console().print(table)
    if left_out:
        print(f"{len(left_out)} more scores in evaluations.jsonl, such as {min(left_out)}")
