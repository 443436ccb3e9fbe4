"""Messages of `flowalign train` at its beginning and end, and tables of scores."""

import inspect
import logging
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
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
"""Rewards that a watch can use for a run that is not trained on them."""


def suggested(config: "BaseConfig") -> list[str]:
    """Names of rewards for watching a run without a panel; none for a run that makes texts."""
    if config.evaluation.panel or config.evaluation.prompts is None or config.model.kind != "pictures":
        return []
    trained = {entry.name for entry in config.rewards}
    # models of photographs cannot judge the world of shapes
    return ["tiny_clip"] if "shapes" in trained else [name for name in PANEL if name not in trained]


def suggest_panel(config: "BaseConfig") -> None:
    """Explain the panel before a run that has none."""
    for name in suggested(config)[:1]:
        print(
            "no evaluation.panel: a reward that is not trained on shows when the one that is gets gamed, e.g. "
            f"evaluation.panel='[{{name: {name}}}]'"
        )


class Warnings(logging.Handler):
    """Keeps a run's warnings, to repeat them at its end."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def print_ending(trainer: "Trainer", warnings: Sequence[str] = ()) -> None:
    """Print the held-out scores before and after, the warnings, where the result is, and the next commands."""
    from flowalign.policies.diffusion import DiffusersPolicy

    config = trainer.config
    gain = trainer.evaluator.gain()
    if gain is not None:
        panel = [name for name in next(iter(gain.results.values())).parts if name.startswith("panel/")]
        print_comparison(gain, "gain", ["reward", *panel])
        print_verdict(gain)
    if warnings:
        count = "1 warning" if len(warnings) == 1 else f"{len(warnings)} warnings"
        print(f"{count} on the way, first: {warnings[0]}")
    result = Result(trainer.folder)
    print(f"run folder: {result.folder}")
    if result.lora is not None:
        print(f"lora: {result.lora}")
    if result.lora is not None and isinstance(trainer.policy, DiffusersPolicy):
        lines = in_plain_diffusers(config.model.path, str(result.lora))
        sizes = {side: getattr(config.evaluation, side, None) for side in ("height", "width", "num_frames")}
        known = inspect.signature(type(trainer.policy.pipeline).__call__).parameters
        given = [
            f"{name}={value!r}"
            for name, value in {**sizes, **trainer.policy.encoder.options}.items()
            if value is not None and name in known
        ]
        print("in plain diffusers:", *lines, f"pipe({', '.join([repr(trainer.prompts.texts[0]), *given])})", sep="\n  ")
    run, prompt = shlex.quote(str(result.folder)), shlex.quote(trainer.prompts.texts[0])
    trust = " --trust" if names_own_code(config.model_dump(exclude={"name"})) else ""
    commands = [f"gallery {run} --serve", f"sample {run} {prompt} --count 4{trust}"]
    if config.evaluation.prompts is not None:
        commands.append(f"eval {run} --base --pictures 8{trust}")
    commands += [f"watch {run} --panel {name}{trust}" for name in suggested(config)[:1]]
    print("next:", *(f"flowalign {command}" for command in commands), sep="\n  ")


def names_own_code(values: object) -> bool:
    """Does a configuration name a part by its dotted path? Commands run such code with --trust alone."""
    if isinstance(values, Mapping):
        named = [value for key, value in values.items() if key in ("name", "kernel") and isinstance(value, str)]
        return any("." in name or ":" in name for name in named) or any(map(names_own_code, values.values()))
    return isinstance(values, list | tuple) and any(map(names_own_code, values))


def in_plain_diffusers(model: str, lora: str, file: str | None = None) -> list[str]:
    """Lines of Python that load a run's LoRA with diffusers alone.

    Args:
        model: `model.path` of the run.
        lora: folder of the LoRA.
        file: its file there; default the name that diffusers gives it.
    """
    from flowalign.data import ASSETS, shipped
    from rewards.hub import split_revision

    name, revision = split_revision(model)
    imports = ["from diffusers import DiffusionPipeline"]
    if Path(shipped(model)).is_relative_to(ASSETS):
        imports.append("from flowalign.data import ASSETS")
        source = f'ASSETS / "{name}"'
        if "text_encoder_3" in Path(shipped(model), "model_index.json").read_text(encoding="utf-8"):
            # a Stable Diffusion 3 without T5
            source += ", text_encoder_3=None, tokenizer_3=None"
    else:
        source = f'"{name}"' + ("" if revision is None else f', revision="{revision}"')
    named = "" if file is None else f', weight_name="{file}"'
    loads = [f"pipe = DiffusionPipeline.from_pretrained({source})", f'pipe.load_lora_weights("{lora}"{named})']
    return [*imports, *loads]


def print_verdict(gain: "Comparison") -> None:
    """Print a line if the trained reward did not rise on held-out prompts beyond the error of its mean."""
    from flowalign.evaluation.statistics import significance

    row = next(row for row in gain.rows() if (row.prompts, row.score) == ("all", "reward"))
    found = significance(row.gains[0], row.of)
    if found is None:
        print("one held-out prompt cannot tell whether the reward rose; raise evaluation.limit")
    elif found.high < 0:
        print("the held-out reward FELL by more than its error; docs/troubles.md says what helps")
    elif found.low <= 0:
        print(
            f"no gain shown: the 95% interval of the held-out difference, {found.low:+.3f} to {found.high:+.3f}, "
            "contains 0; more iterations, or more held-out prompts, may tell"
        )


def print_comparison(comparison: "Comparison", gain: str | None = None, scores: Sequence[str] | None = None) -> None:
    """Print a table with a row for each score: its mean in every evaluation, and paired differences to the first.

    A category that all samples have is not told apart from all of them.

    Args:
        gain: heading of the difference, if there is only one.
        scores: names of the scores to print, the others are counted; default all.
    """
    first, *others = comparison.results
    samples = comparison.results[first].prompts
    title = f"{len(samples)} samples of {len(set(samples))} held-out prompts, ± standard error"
    # without lines between columns the table fits 80 characters
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("prompts")
    table.add_column("score")
    for heading in (first, *others, *([gain] if gain else [f"{name} - {first}" for name in others])):
        table.add_column(heading, justify="right")
    above, left_out = "", set()
    rows = [row for row in comparison.rows() if row.prompts == "all" or len(row.of) < len(samples)]
    for row in rows:
        if scores is not None and row.score not in scores:
            left_out.add(row.score)
            continue
        if above and row.prompts != above:
            table.add_section()
        means = ["" if estimate is None else f"{estimate}" for estimate in row.means]
        gains = ["" if estimate is None else f"{estimate:+}" for estimate in row.differences]
        table.add_row("" if row.prompts == above else row.prompts, row.score, *means, *gains)
        above = row.prompts
    Console().print(table)
    if left_out:
        print(f"{len(left_out)} more scores in evaluations.jsonl, such as {min(left_out)}")
