"""One page that compares runs: scores with their significance, settings, curves, and pictures side by side."""

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader

from flowalign.app.gallery.build import CLIPS, PICTURES, SOUNDS, thinned
from flowalign.app.gallery.runs import SavedRun, SavedSample, read_runs
from flowalign.evaluation.comparison import Comparison, Row
from flowalign.evaluation.statistics import Significance, significance
from flowalign.runs.environment import flat
from flowalign.runs.files import write_atomically
from flowalign.runs.foreign import check_folder, write_new
from flowalign.runs.reading import read_yaml
from rewards.pictures import PictureError, opened

SHOWN = 24
"""Number of samples on the page: those that differ most."""
FIRST = re.compile(r"reward/mean$|held-out all/(?!statistics|pictures)|policy/kl")
"""Curves that are shown at once; the others on demand."""
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420, 190, 52, 10, 10, 26
"""Pixels of a chart, and of its margins."""


@dataclass(kw_only=True)
class Chart:
    """The curves of a metric of all runs."""

    name: str
    ticks: list[tuple[float, str]]
    """(y, words)"""
    ends: list[tuple[float, str]]
    """(x, iteration)"""
    lines: list[tuple[int, str]]
    """(number of the run, points)"""


@dataclass(kw_only=True)
class Side:
    """A run's sample."""

    reward: float | None
    text: str | None
    picture: str = ""
    """Name of the file in the page's folder."""
    clip: bool = False
    small: bool = False
    """Whether its single pixels are shown."""


@dataclass(kw_only=True)
class ComparedSample:
    """A sample of one prompt and seed, of every run."""

    prompt: str
    seed: str
    sides: list[Side]
    gain: float
    """Largest difference to the first run."""


def build_comparison(
    runs: Sequence[Path], comparison: Comparison, moments: Sequence[tuple[Path, int]], output: Path
) -> Path:
    """Write the page and its pictures into a folder.

    Args:
        runs: folders of the runs; the others are compared with the first.
        comparison: comparison of their scores, in the same order.
        moments: for each run, the folder with the samples to show, and their iteration.

    Returns:
        path of the page.
    """
    read = read_runs(list(runs))
    labels = list(comparison.results)
    output.mkdir(parents=True, exist_ok=True)
    check_folder(output)
    (output / "assets").mkdir(exist_ok=True)
    for name in ("gallery.css", "comparison.css"):
        write_new(output / "assets" / name, (Path(__file__).parent / "static" / name).read_bytes())
    rows = [(row, _significances(row)) for row in comparison.rows()]
    charts = list(_charts(read))
    page = Environment(loader=PackageLoader("flowalign.app.gallery"), autoescape=True).get_template("comparison.html")
    first = comparison.results[labels[0]]
    text = page.render(
        labels=labels,
        rows=rows,
        verdicts=verdicts(comparison),
        prompts=len(set(first.prompts)),
        samples=len(first.prompts),
        tests=sum(sign is not None for _, signs in rows for sign in signs),
        settings=_settings(runs),
        first=[chart for chart in charts if FIRST.match(chart.name)],
        others=[chart for chart in charts if not FIRST.match(chart.name)],
        shown=_shown(moments, output),
        size=(WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM),
    )
    write_atomically(output / "index.html", text)
    return output / "index.html"


def _significances(row: Row) -> list[Significance | None]:
    """Of each difference to the first run; None without a difference, and of too few prompts."""
    gains = zip(row.gains, row.differences)
    return [None if difference is None else significance(values, row.of) for values, difference in gains]


def verdicts(comparison: Comparison) -> list[str]:
    """A sentence for each run but the first: is its reward better, worse, or not clearly different?"""
    first, *others = comparison.results
    row = next(comparison.rows())
    return [_verdict(first, *of_run) for of_run in zip(others, row.differences, _significances(row))]


def _verdict(first: str, other: str, difference: Any, sign: Significance | None) -> str:
    """A sentence about the difference of the rewards."""
    if difference is None or sign is None:
        return f"{other} and {first}: too few prompts to say which is better."
    figures = f"{difference.mean:+.3f} [{sign.low:+.3f}, {sign.high:+.3f}], p = {sign.p:.2g}"
    if sign.p >= 0.05:
        return f"No clear difference between {other} and {first}: {figures}."
    return f"{other} is {'better' if difference.mean > 0 else 'worse'} than {first}: {figures}."


def _settings(runs: Sequence[Path]) -> list[tuple[str, list[str]]]:
    """The settings in which runs differ, as YAML."""
    configured = [flat(read_yaml(run / "config.yaml")) for run in runs]
    names = dict.fromkeys(name for settings in configured for name in settings)
    rows = [
        (name, [as_yaml(settings[name]) if name in settings else "" for settings in configured])
        for name in names
        if name not in ("name", "output")
    ]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def as_yaml(value: object) -> str:
    """A value as a configuration has it, in a line."""
    return (
        yaml.safe_dump(value, default_flow_style=True, width=1_000_000, allow_unicode=True)
        .removesuffix("...\n")
        .strip()
    )


def _charts(runs: Sequence[SavedRun]) -> Iterator[Chart]:
    """Every metric that changes in one of the runs."""
    for name in dict.fromkeys(name for run in runs for name in run.series):
        lines = [(number, thinned(run.series.get(name, []))) for number, run in enumerate(runs)]
        points = [point for _, line in lines for point in line]
        (start, end), (low, high) = ((min(of), max(of)) for of in zip(*points, strict=True))
        if low == high or start == end:
            continue

        def x(iteration: float, start: int = start, end: int = end) -> float:
            return LEFT + (iteration - start) / (end - start) * (WIDTH - LEFT - RIGHT)

        def y(value: float, low: float = low, high: float = high) -> float:
            return TOP + (1 - (value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM)

        yield Chart(
            name=name,
            ticks=[(y(value), f"{value:.3g}") for value in (low, (low + high) / 2, high)],
            ends=[(x(iteration), str(iteration)) for iteration in (start, end)],
            lines=[(number, " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in line)) for number, line in lines if line],
        )


def _shown(moments: Sequence[tuple[Path, int]], output: Path) -> list[ComparedSample]:
    """Samples of one prompt and seed that all runs have, those that differ most first."""
    shutil.rmtree(output / "pictures", ignore_errors=True)
    by_run = [_samples(folder, iteration) for folder, iteration in moments]
    rows = []
    for key in by_run[0]:
        same = [samples[key] for samples in by_run if key in samples]
        if len(same) == len(by_run):
            rewards = [sample.scores.get("reward") for sample in same]
            known = [reward for reward in rewards if reward is not None]
            gain = max((b - known[0] for b in known[1:]), key=abs) if len(known) == len(same) else 0.0
            rows.append((gain, same))
    rows.sort(key=lambda row: -abs(row[0]))
    return [
        ComparedSample(
            prompt=same[0].prompt,
            seed=same[0].seed,
            sides=[_placed(sample, number, run, output) for run, sample in enumerate(same)],
            gain=gain,
        )
        for number, (gain, same) in enumerate(rows[:SHOWN])
    ]


def _placed(sample: SavedSample, number: int, run: int, output: Path) -> Side:
    """A sample of the page; its picture is copied to the page's folder."""
    reward = sample.scores.get("reward")
    if sample.text is not None:
        return Side(reward=reward, text=sample.text)
    suffix = sample.path.suffix.lower()
    clip, small = suffix in CLIPS, False
    if suffix not in CLIPS | SOUNDS | PICTURES:
        raise PictureError(f"{sample.path} has the ending of no picture")
    if suffix in PICTURES:
        with opened(sample.path) as picture:
            small = max(picture.size) <= 128
    name = f"pictures/{number:02d}-{run}{suffix}"
    (output / "pictures").mkdir(exist_ok=True)
    shutil.copyfile(sample.path, output / name)
    return Side(reward=reward, text=None, picture=name, clip=clip, small=small)


def _samples(folder: Path, iteration: int) -> dict[tuple[str, str, int], SavedSample]:
    """Samples of an iteration by prompt, seed, and a number from 0 for samples that share both."""
    (run,) = read_runs([folder])
    samples: dict[tuple[str, str, int], SavedSample] = {}
    for moment in run.moments:
        for sample in moment.samples if moment.iteration == iteration else []:
            again = sum(key[:2] == (sample.prompt, sample.seed) for key in samples)
            samples[sample.prompt, sample.seed, again] = sample
    return samples
