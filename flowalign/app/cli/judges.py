"""Commands for training judges by GRPO: pairs as questions, and the two stages of imitation before it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowalign.app.cli.numbers import finite
from flowalign.errors import ConfigError
from flowalign.runs.files import check_output, write_atomically

if TYPE_CHECKING:
    from flowalign.config.language import TextConfig


def pair_questions(
    preferences: Annotated[str, typer.Argument(help="JSON lines, as `flowalign gallery RUN --export FILE` writes.")],
    output: Annotated[Path, typer.Option("--out", "-o", help="File of the questions.")],
    template: Annotated[
        str, typer.Option(help="Template of a judge that compares two pictures; for texts text_better or text_pair.")
    ] = "reward_dance_pair",
    hostile: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            callback=finite,
            help="Of texts: ask about hostile answers too (none, an opening, instructions to the judge), this many as "
            "a share of the pairs.",
        ),
    ] = 0.0,
) -> None:
    """Write votes as questions with answers, each pair in both orders, for training a judge by GRPO."""
    from flowalign.data import Preferences
    from flowalign.reward_training.judge import questions

    check_output(output, "--out")
    records = questions(Preferences.read(preferences), template, hostile)
    write_atomically(output, "".join(json.dumps(record) + "\n" for record in records))
    print(f"{len(records)} questions: {output}")


def cold_start(
    config: Annotated[Path, typer.Argument(help="YAML of the GRPO run that follows.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    output: Annotated[Path, typer.Option("--out", "-o", help="New folder for the model.")] = Path("runs/started"),
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the demonstrations.")] = 1,
    learning_rate: Annotated[
        float, typer.Option(min=0, callback=finite, help="AdamW's first learning rate; it falls linearly to 0.")
    ] = 1e-5,
) -> None:
    """Train a model to imitate the `demonstration` of every prompt, so that it knows the format of replies."""
    from flowalign.reward_training import rejection as stage

    report = stage.cold_start(_settings(config, overrides, output), output, epochs, learning_rate)
    print(f"{report['demonstrations']} demonstrations imitated, loss {report['loss']:.3f} a token at the end")
    print(f"next: flowalign rejection-sampling {config} model.path={output / 'model'} data.prompts=questions.jsonl")


def rejection_sampling(
    config: Annotated[Path, typer.Argument(help="YAML of the GRPO run that follows.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    output: Annotated[
        Path, typer.Option("--out", "-o", help="New folder for the model and the prompts that are left.")
    ] = Path("runs/imitated"),
    samples: Annotated[int, typer.Option(min=1, help="Replies per prompt.")] = 1,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the right replies.")] = 1,
    learning_rate: Annotated[
        float, typer.Option(min=0, callback=finite, help="AdamW's first learning rate; it falls linearly to 0.")
    ] = 1e-5,
) -> None:
    """Train a model to imitate its own right replies, and write the prompts without one for GRPO."""
    from flowalign.reward_training import rejection as stage

    report = stage.rejection_sampling(_settings(config, overrides, output), output, samples, epochs, learning_rate)
    print(
        f"{report['right_replies']:.1%} of the replies are right; {report['imitated']} prompts imitated, "
        f"{report['left']} left"
    )
    print(f"next: flowalign train {config} model.path={output / 'model'} data.prompts={output / 'wrong.jsonl'}")


def _settings(config: Path, overrides: list[str] | None, output: Path) -> "TextConfig":
    """The configuration, checked for a stage that writes a new folder."""
    from flowalign.config import load
    from flowalign.config.language import TextConfig

    settings = load(config, overrides or [])
    if not isinstance(settings, TextConfig):
        raise ConfigError(f"{config}: replies are texts, and this model makes pictures")
    settings.check(processes=1)
    if output.exists():
        raise ConfigError(f"{output} is there already; --out names a new folder")
    return settings
