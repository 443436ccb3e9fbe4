"""What `flowalign train` says before it begins and when it is done, and tables of scores."""

import shlex
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from flowalign.runs.result import Result

if TYPE_CHECKING:
    from flowalign.config import BaseConfig
    from flowalign.evaluation.comparison import Comparison
    from flowalign.training import Trainer

PANEL = ("image_reward", "pick_score", "clip_score")
"""rewards to watch a run by that is not trained on them"""


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


def print_ending(trainer: "Trainer") -> None:
    """The held-out scores before and after, where the result is, and what can be done with it."""
    config = trainer.config
    gain = trainer.evaluator.gain()
    if gain is not None:
        print_comparison(gain, "gain")
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


def print_comparison(comparison: "Comparison", gain: str | None = None) -> None:
    """A table, a row a score: its mean in every evaluation, and the paired differences to the first.

    Args:
        gain: the heading of the difference, where there is one.
    """
    first, *others = comparison.results
    samples = comparison.results[first].prompts
    title = f"{len(samples)} samples of {len(set(samples))} held-out prompts, ± standard error"
    table = Table(title=title, title_justify="left")
    table.add_column("prompts")
    table.add_column("score")
    for heading in (first, *others, *([gain] if gain else [f"{name} - {first}" for name in others])):
        table.add_column(heading, justify="right")
    above = ""
    for row in comparison.rows():
        if above and row.prompts != above:
            table.add_section()
        means = ["" if own is None else f"{own}" for own in row.means]
        gains = ["" if own is None else f"{own:+}" for own in row.differences]
        table.add_row("" if row.prompts == above else row.prompts, row.score, *means, *gains)
        above = row.prompts
    Console().print(table)
