"""The command that measures how difficult prompts are for a model."""

import json
from pathlib import Path
from typing import Annotated

import typer

from flowalign.files import write_atomically


def difficulty(
    config: Annotated[Path, typer.Argument(help="YAML configuration of the training that the prompts are for.")],
    output: Annotated[Path, typer.Argument(help="JSON lines to write: the prompts with their success rates.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples a prompt.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first sample.")] = 0,
) -> None:
    """Measure the mean reward of every prompt before training, for `data.difficulty` to choose by."""
    import torch

    from flowalign.config import load
    from flowalign.data import Prompts
    from flowalign.training.evaluation import evaluate
    from flowalign.training.trainer import build_policy, build_reward

    settings = load(config, overrides or [])
    policy = build_policy(settings, "cuda" if torch.cuda.is_available() else "cpu")
    prompts = Prompts.of(settings.data)
    result = evaluate(policy, build_reward(settings.rewards), prompts, settings.rollout, samples, seed)
    rates = torch.tensor(result.value).view(-1, samples).mean(1).tolist()
    rated = zip(prompts.texts, prompts.metadata, rates, strict=True)
    lines = [json.dumps({settings.data.column: text, **record, "success_rate": rate}) for text, record, rate in rated]
    write_atomically(output, "\n".join(lines) + "\n")
    middling = sum(0 < rate < 1 for rate in rates)
    print(f"{len(rates)} prompts, mean {sum(rates) / len(rates):.3f}, {middling} between 0 and 1: {output}")
