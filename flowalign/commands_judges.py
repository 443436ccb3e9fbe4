"""Commands that train judges by reinforcement: pairs as questions, and rejection sampling before GRPO."""

import json
from pathlib import Path
from typing import Annotated

import typer

from flowalign.errors import ConfigError
from flowalign.files import write_atomically


def pair_questions(
    preferences: Annotated[str, typer.Argument(help="JSON lines, as `flowalign gallery RUN --export FILE` writes.")],
    output: Annotated[Path, typer.Option("--out", "-o", help="File of the questions.")],
    template: Annotated[str, typer.Option(help="Of a judge that compares two pictures.")] = "reward_dance_pair",
) -> None:
    """Write votes as questions with answers, each pair in both orders, to train a judge on by GRPO."""
    from flowalign.data import Preferences
    from flowalign.training.judge import questions

    records = questions(Preferences.read(preferences), template)
    write_atomically(output, "".join(json.dumps(record) + "\n" for record in records))
    print(f"{len(records)} questions: {output}")


def sift(
    config: Annotated[Path, typer.Argument(help="YAML of the GRPO run that follows.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    output: Annotated[Path, typer.Option("--out", "-o", help="New folder for the model and what is left.")] = Path(
        "runs/sifted"
    ),
    samples: Annotated[int, typer.Option(min=1, help="Replies a prompt.")] = 1,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the right replies.")] = 1,
    learning_rate: Annotated[float, typer.Option(min=0, help="Of AdamW, falling linearly to 0.")] = 1e-5,
) -> None:
    """Let a model reply, imitate its right replies, and keep the prompts that it got wrong for GRPO."""
    from flowalign.config import load
    from flowalign.config_text import TextConfig
    from flowalign.training import sift as stage

    settings = load(config, overrides or [])
    if not isinstance(settings, TextConfig):
        raise ConfigError(f"{config}: replies are texts, and this model makes pictures")
    settings.check(processes=1)
    if output.exists():
        raise ConfigError(f"{output} is there already; --out names a new folder")
    report = stage.sift(settings, output, samples, epochs, learning_rate)
    print(
        f"{report['right_replies']:.1%} of the replies are right; {report['imitated']} prompts imitated, "
        f"{report['left']} left"
    )
    print(f"next: flowalign train {config} model.path={output / 'model'} data.prompts={output / 'wrong.jsonl'}")
