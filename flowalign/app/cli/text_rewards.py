"""Reward models of texts from preferences: training, and how strong each preference is by several models."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowalign.app.cli.numbers import finite
from flowalign.errors import ConfigError
from flowalign.runs.files import check_output, write_atomically

if TYPE_CHECKING:
    from flowalign.data import Preferences

RATE = 1e-5
"""First learning rate of a reward model of texts."""


def read_texts(source: str) -> "Preferences":
    """Preferences between texts: exported votes, or lines with a prompt, 'chosen' and 'rejected' as TRL has them."""
    from flowalign.data import Preferences
    from flowalign.data.texts import TextPreferences

    read = TextPreferences.read(source)
    return Preferences(read.texts, [record | {"medium": "text"} for record in read.metadata])


def are_texts(preferences: "Preferences") -> bool:
    """Whether all choices are between texts."""
    return all(record.get("medium") == "text" for record in preferences.metadata)


def train_on_texts(
    pairs: "Preferences",
    heldout: "Preferences | None",
    output: Path,
    model: str | None,
    template: str | None,
    loss: str,
    reference: str | None,
    epochs: int,
    learning_rate: float,
    batch_size: int,
    seed: int,
) -> tuple[dict[str, Any], str]:
    """Train a reward model of texts, or with a template a judge; return the report, and the line that uses it."""
    from flowalign.data import shipped
    from flowalign.reward_training.judge import JudgeScorer
    from flowalign.reward_training.scorer import split, train_reward
    from flowalign.reward_training.texts import TextScorer

    if model is None:
        raise ConfigError("--model: a reward model of texts is made of a language model or reward model; name one")
    path = str(shipped(model))
    scorer: Any
    if template is not None:
        scorer = JudgeScorer(path, template)
        if not scorer.template.texts:
            raise ConfigError(
                f"template '{template}' is about pictures, and these preferences between texts; text_better works"
            )
    else:
        scorer = TextScorer(path, loss, reference, seed=seed)
    train, test = split(pairs, 0.1, seed) if heldout is None else (pairs, heldout)
    report = train_reward(scorer, train, test, output, epochs, learning_rate, batch_size, seed)
    if isinstance(scorer, JudgeScorer):
        name = "text_pairwise" if scorer.template.pairwise else "text_judge"
        return report, f"{{name: {name}, template: {template}, judge: {{model: {output}}}}}"
    if loss == "general":
        return report, f"rewards: [{{name: win_rate, reward: {{name: text_preference, model: {output}}}}}]"
    compared = "" if reference is None else f", reference: {reference}"
    return report, f"rewards: [{{name: text_score, model: {output}{compared}}}]"


def pair_strengths(
    preferences: Annotated[str, typer.Argument(help="Preferences between texts: JSON lines or a data set.")],
    model: Annotated[list[str], typer.Option(help="Reward model to ask; give the option once for each.")],
    output: Annotated[Path, typer.Option("--out", "-o", help="JSON lines to write.")],
    batch_size: Annotated[int, typer.Option(min=1, help="Pairs per network call.")] = 32,
    flip_below: Annotated[
        float | None, typer.Option(callback=finite, help="Turn pairs round whose strength is below this, e.g. 0.")
    ] = None,
    drop_below: Annotated[
        float | None, typer.Option(min=0, callback=finite, help="Leave out pairs whose strength is smaller, in size.")
    ] = None,
) -> None:
    """Write how strong each preference is by several reward models, for `train-reward --loss margin, scaled or
    soft`."""
    from flowalign.data import shipped
    from flowalign.reward_training.texts import flipped, label_strengths

    check_output(output, "--out")
    pairs = read_texts(preferences)
    label_strengths([str(shipped(name)) for name in model], pairs, batch_size)
    below = sum(record["strength"] < 0 for record in pairs.metadata)
    if flip_below is not None or drop_below is not None:
        pairs = flipped(pairs, flip_below, drop_below)
    lines = [json.dumps({"prompt": text, **record}) for text, record in zip(pairs.texts, pairs.metadata, strict=True)]
    write_atomically(output, "\n".join(lines) + "\n")
    print(f"{len(pairs)} preferences, {below} below 0, which are probably the wrong way round: {output}")
