"""A model card: base model, recipe, results, and how to use the model."""

import html
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure

from flowalign.config import BaseConfig
from flowalign.errors import ConfigError, hide
from flowalign.runs.foreign import ForeignError, inside, read_bytes, read_json, read_text, write_new
from flowalign.runs.metrics import MetricsFile
from flowalign.runs.samples import FOLDER as SAMPLES
from flowalign.training.evaluator import before_and_after, ended_at
from rewards.hub import split_revision

PAIRS = 6
"""Samples before and after, at most."""


def write_card(
    run: Path, config: BaseConfig, folder: Path, use: str, tags: Sequence[str], figures: Sequence[Path]
) -> None:
    """Write README.md and its pictures.

    Args:
        use: a paragraph and code that show how to use the files of the folder.
        tags: tags for the hub, besides those of all cards.
        figures: files written by `flowalign eval --json` or `flowalign bench --json`.
    """
    metrics, evaluations = (MetricsFile(run / f"{name}.jsonl").read() for name in ("metrics", "evaluations"))
    training = config.training
    weights = {reward.name: "" if reward.weight == 1 else f" (weight {reward.weight:g})" for reward in config.rewards}
    rewards = ", ".join(f"`{name}`{weight}" for name, weight in weights.items()) or "a reward given in Python"
    sections = [
        f"# {run.resolve().name}",
        f"`{config.model.path}` aligned by `{config.algorithm.name}` with {rewards}: {len(metrics)} iterations of "
        f"{training.prompts_per_iteration} prompts with {training.group_size} samples each, by flowalign.",
        "## Use",
        use,
    ]
    gain = before_and_after(run, config.evaluation.watch)
    if gain is not None:
        sections += ["## Results", _table(gain.record())]
    for file in figures:
        record = _read(file)
        suites = {} if "means" in record else record
        sections += [f"## {file.stem}", *([] if suites else [_table(record)])]
        for name, suite in suites.items():
            sections += [f"### {name}", _bench_table(suite["results"])]
    curves = _curves(metrics, evaluations)
    if curves is not None:
        (folder / "curves.png").write_bytes(curves)
        sections.append("![Curves](curves.png)")
    if pictures := list(_before_and_after(run, config, folder)):
        sections += ["## Before and after", "The same prompts and start noises."]
        sections.append("\n".join(["| prompt | before | after |", "|---|---|---|", *pictures]))
    recipe = hide(read_text(run / "config.yaml")).strip()
    sections += ["## Recipe", f"```yaml\n{recipe}\n```"]
    versions = run / "versions.yaml"
    if versions.is_file():
        sections += ["## Versions", f"```yaml\n{read_text(versions).strip()}\n```"]
    front = yaml.safe_dump(_front(config, tags), sort_keys=False)
    text = f"---\n{front}---\n\n" + "\n\n".join(sections) + "\n"
    (folder / "README.md").write_text(text, encoding="utf-8")


def _front(config: BaseConfig, tags: Sequence[str]) -> dict[str, Any]:
    """The head of a card, which the hub reads."""
    pictures = config.model.kind == "pictures"
    front: dict[str, Any] = {"library_name": "diffusers" if pictures else "transformers"}
    base, _ = split_revision(config.model.path)
    if not Path(base).exists() and base.count("/") == 1:
        front["base_model"] = base
    if not pictures:
        front["pipeline_tag"] = "text-generation"
    return front | {"tags": ["flowalign", "reinforcement-learning", *tags]}


def _read(file: Path) -> dict[str, Any]:
    try:
        record = read_json(file)
    except (OSError, ForeignError) as error:
        raise ConfigError(f"--figures: {file} cannot be read as JSON: {error}") from error
    is_comparison = isinstance(record, dict) and {"means", "differences", "samples", "prompts"} <= record.keys()
    suites = list(record.values()) if isinstance(record, dict) else []
    if not is_comparison and not (suites and all(isinstance(suite, dict) and "results" in suite for suite in suites)):
        raise ConfigError(f"--figures: {file} is none that `flowalign eval --json` or `flowalign bench --json` wrote")
    return dict(record)


def _bench_table(results: Mapping[str, Mapping[str, Mapping[str, float | None]]]) -> str:
    """A suite's means by model and score, with their 95% intervals, as a table in Markdown."""
    rows = [f"| score | {' | '.join(results)} |", "|---" + "|---:" * len(results) + "|"]
    for score in next(iter(results.values())):
        cells = [_interval(scores.get(score), name == "difference") for name, scores in results.items()]
        rows.append(f"| {score} | {' | '.join(cells)} |")
    return "Means with 95% intervals over prompts.\n\n" + "\n".join(rows)


def _interval(figures: Mapping[str, float | None] | None, signed: bool) -> str:
    if figures is None:
        return ""
    mean, low, high = (figures[name] for name in ("mean", "low", "high"))
    sign = "+" if signed else ""
    return f"{mean:{sign}.3f}" + ("" if low is None else f" [{low:{sign}.3f}, {high:{sign}.3f}]")


def _table(record: Mapping[str, Any]) -> str:
    """A comparison's record as a table in Markdown."""
    means, differences = record["means"], record["differences"]
    columns = {**means, **{f"{name} - {record['compared_with']}": column for name, column in differences.items()}}
    rows = [f"| prompts | score | {' | '.join(columns)} |", "|---|---" + "|---:" * len(columns) + "|"]
    for prompts, scores in next(iter(means.values())).items():
        for score in scores:
            cells = [_figure(column.get(prompts, {}).get(score), name not in means) for name, column in columns.items()]
            rows.append(f"| {prompts} | {score} | {' | '.join(cells)} |")
    return f"{record['samples']} samples of {record['prompts']} held-out prompts, ± standard error.\n\n" + "\n".join(
        rows
    )


def _figure(figures: Mapping[str, float | None] | None, signed: bool) -> str:
    if figures is None:
        return ""
    error = figures["error"]
    return f"{figures['mean']:{'+' if signed else ''}.3f}" + ("" if error is None else f" ± {error:.3f}")


def _curves(metrics: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> bytes | None:
    """Plot the trained and the held-out reward, and the KL if there is one; None without any curve."""
    curves = []
    for title, lines, name in (
        ("trained reward", metrics, "reward/mean"),
        ("held-out reward", evaluations, "all/reward"),
        ("KL", metrics, "policy/kl"),
    ):
        points = [(line["iteration"], line[name]) for line in lines if name in line]
        if len(points) > 1:
            curves.append((title, points))
    if not curves:
        return None
    figure = Figure(figsize=(4.5 * len(curves), 3.2), layout="constrained")
    for axis, (title, points) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves, strict=True):
        axis.plot(*zip(*points, strict=True), color="tab:blue", marker="o" if len(points) < 20 else None)
        axis.set_title(title)
        axis.set_xlabel("iteration")
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()


def _before_and_after(run: Path, config: BaseConfig, folder: Path) -> Iterator[str]:
    """Rows of a table of saved samples before training and of the result; their pictures are copied to the card."""
    moments = [_saved(run, iteration) for iteration in (0, ended_at(run, config.evaluation.watch))]
    both = [key for key in moments[0] if key in moments[1]] if moments[0] is not moments[1] else []
    for number, key in enumerate(both[:: max(1, len(both) // PAIRS)][:PAIRS]):
        cells = []
        for label, moment in zip(("before", "after"), moments, strict=True):
            source, record = moment[key]
            if source is None:
                cells.append(html.escape(" ".join(record["text"].split()).replace("|", "\\|")))
                continue
            target = folder / "pictures" / f"{number:02d}-{label}{source.suffix}"
            target.parent.mkdir(exist_ok=True)
            write_new(target, read_bytes(source))
            cells.append(f"![{record['reward']:.3f}](pictures/{target.name})<br>{record['reward']:.3f}")
        prompt = html.escape(" ".join(key[0].split()).replace("|", "\\|"))
        yield f"| {prompt} | {' | '.join(cells)} |"


def _saved(run: Path, iteration: int) -> dict[tuple[str, int], tuple[Path | None, dict[str, Any]]]:
    """Samples that a run saved at an iteration, by prompt and seed, each with its picture and its line."""
    folder = run / SAMPLES / f"iteration-{iteration:06d}"
    if not (folder / "samples.jsonl").is_file():
        return {}
    samples = {}
    for line in read_text(folder / "samples.jsonl").splitlines():
        try:
            record = json.loads(line)
            key, picture, _ = (record["prompt"], record["seed"]), record.get("picture"), float(record["reward"])
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{folder / 'samples.jsonl'} has a line that is no sample's: {line[:80]}") from error
        samples[key] = (None if picture is None else inside(folder, picture), record)
    return samples
