"""`flowalign power`: how many seeds and pictures show a difference between two recipes."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowalign.app.cli.evaluate import Json, Trust
from flowalign.app.cli.modules import opened
from flowalign.app.cli.numbers import finite
from flowalign.errors import ConfigError
from flowalign.runs.files import check_output, write_atomically

if TYPE_CHECKING:
    from flowalign.evaluation.power import Spread

SEEDS = (2, 3, 5, 10, 20)
SAVED: Mapping[str, Any] = {
    **dict.fromkeys(("output", "name", "trackers", "show_every"), True),
    "evaluation": {"save_samples"},
    "training": {"previews", "checkpoint_every", "keep_checkpoints"},
}
"""Settings of what a run writes and shows, which leave its figures as they are."""


def power(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN RUN...", help="Folders of runs of one recipe with other seeds.")
    ],
    difference: Annotated[
        float | None,
        typer.Option(min=0, callback=finite, help="Difference of the held-out reward to look for, e.g. 0.05."),
    ] = None,
    score: Annotated[str, typer.Option(help="The reward, or one of its parts, e.g. strict.")] = "reward",
    json_path: Json = None,
    trust: Trust = False,
) -> None:
    """Say how many seeds and pictures show a difference between two recipes, by the spread of one recipe's runs."""
    from flowalign.evaluation.power import detectable, spread_of

    if json_path is not None:
        check_output(json_path, "--json")
    found = spread_of(scores_of_runs(runs, score, trust))
    show(found, score)
    record = {"spread": found.record()} | {
        "detectable": {str(seeds): detectable(found.deviation(found.prompts, found.pictures), seeds) for seeds in SEEDS}
    }
    if difference is not None:
        record["seeds"] = show_seeds(found, difference)
        record["pictures"] = show_pictures(found, difference)
    if json_path is not None:
        write_atomically(json_path, json.dumps(record, indent=1) + "\n")


def scores_of_runs(runs: list[Path], score: str, trust: bool) -> list[list[list[float]]]:
    """[runs, prompts, pictures] scores of the runs' results.

    Raises:
        ConfigError: a run is named twice, was trained or judged otherwise, or has no such score.
    """
    from flowalign.app.cli.compare import check_alike, result_of
    from flowalign.config import load
    from flowalign.evaluation.statistics import by_prompt

    if len({run.resolve() for run in runs}) < max(2, len(runs)):
        raise ConfigError("power takes two runs or more of one recipe, each once")
    results = {}
    for run in runs:
        with opened(run, trust, ()):
            results[str(run)], _ = result_of(run)
    check_alike({str(run): run for run in runs}, results)
    configs = [load(run / "config.yaml") for run in runs]
    for run, config in zip(runs, configs, strict=True):
        one, two = (own.model_dump(exclude=SAVED) for own in (configs[0], config))
        if run != runs[0] and one["training"].pop("seed") == two["training"].pop("seed"):
            raise ConfigError(f"{runs[0]} and {run} have one seed; power needs runs of other seeds")
        if run != runs[0] and one != two:
            keys = ", ".join(key for key in one if one[key] != two.get(key))
            raise ConfigError(f"{run} differs from {runs[0]} in more than the seed ({keys}); give runs of one recipe")
    tables = []
    for name, result in results.items():
        columns = {"reward": result.value, **result.parts}
        if score not in columns:
            raise ConfigError(f"--score {score}: {name} has {', '.join(columns)}")
        tables.append(by_prompt(columns[score], result.prompts))
    if len({len(samples) for table in tables for samples in table}) > 1:
        raise ConfigError(f"--score {score}: it does not apply to every picture, so that prompts are of other sizes")
    return tables


def show(found: "Spread", score: str) -> None:
    """Print the measured spread, and what numbers of seeds and pictures could show."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from flowalign.evaluation.power import LEVEL, POWER, detectable

    own, endless = found.deviation(found.prompts, found.pictures), found.seed**0.5
    print(f"{found.runs} runs, {found.prompts} prompts, {found.pictures} pictures each: {score}")
    low, high = f"{found.measured.low:.3f}", f"{found.measured.high:.3f}"
    print(f"standard deviation from seed to seed: {found.measured.mean:.3f} (95% interval {low} to {high})")
    print(f"of it, what more pictures would not take away: {endless:.3f}")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for heading in ("seeds each", "as evaluated", "four times the pictures", "endless pictures"):
        table.add_column(heading, justify="right")
    four = found.deviation(found.prompts, 4 * found.pictures)
    for seeds in SEEDS:
        table.add_row(str(seeds), *(f"{detectable(deviation, seeds):.3f}" for deviation in (own, four, endless)))
    Console().print(table)
    print(
        f"the difference between two recipes that is found in {POWER:.0%} of the comparisons, at the {LEVEL:.0%} level"
    )


def show_seeds(found: "Spread", difference: float) -> dict[str, int | None]:
    """Print the seeds that a difference takes, by the spread and by the ends of its interval; None is above 200."""
    from flowalign.evaluation.power import MOST, seeds_for

    measured = found.measured
    assert measured.low is not None and measured.high is not None
    deviations = {"low": measured.low, "seeds": measured.mean, "high": measured.high}
    needed = {name: seeds_for(difference, deviation) for name, deviation in deviations.items()}
    few, some, many = (f"more than {MOST}" if count is None else str(count) for count in needed.values())
    print(f"a difference of {difference:g} takes {some} seeds of each recipe ({few} to {many} by the interval)")
    return needed


def show_pictures(found: "Spread", difference: float) -> dict[str, dict[str, float | None] | None]:
    """Print the pictures a prompt that a difference takes with few seeds; None in the place of infinity."""
    from flowalign.evaluation.power import pictures_for

    measured = found.measured
    assert measured.low is not None and measured.high is not None
    if found.pictures == 1 or not measured.mean:
        print("pictures a prompt: cannot tell, since the runs were evaluated with one a prompt, or do not differ")
        return {}
    scales = {"low": measured.low / measured.mean, "pictures": 1.0, "high": measured.high / measured.mean}
    needed: dict[str, dict[str, float | None] | None] = {}
    for seeds in SEEDS[:3]:
        counts = {name: pictures_for(difference, seeds, found, scale) for name, scale in scales.items()}
        few, some, many = ("no number" if count == math.inf else f"{count:.0f}" for count in counts.values())
        print(f"  with {seeds} seeds of each recipe: {some} pictures a prompt ({few} to {many} by the interval)")
        needed[str(seeds)] = {name: None if count == math.inf else count for name, count in counts.items()}
    return needed
