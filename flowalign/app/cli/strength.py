"""`flowalign strength`: a run's LoRA at several strengths."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowalign.app.cli.evaluate import (
    Json,
    Panel,
    Pictures,
    Trust,
    card_of,
    heldout_of,
    judge_of,
    judges_of,
    loaded,
    show_cards,
)
from flowalign.app.cli.sampling import with_sampling
from flowalign.errors import ConfigError
from flowalign.runs.files import check_output, write_atomically

if TYPE_CHECKING:
    from flowalign.evaluation.strength import StrengthCurve


@with_sampling
def strength(
    requested: dict[str, Any],
    run: Annotated[Path, typer.Argument(help="A run's folder, with a LoRA.")],
    strengths: Annotated[str, typer.Option(help="Factors of the LoRA, with commas.")] = "0,0.25,0.5,0.75,1,1.25,1.5",
    film: Annotated[
        Path | None, typer.Option(help="Write a picture to this file: four prompts, from the lowest strength on.")
    ] = None,
    slider: Annotated[
        Path | None, typer.Option(help="Write a folder whose page in the gallery has a slider of the strength.")
    ] = None,
    panel: Panel = None,
    pictures: Pictures = None,
    json_path: Json = None,
    trust: Trust = False,
) -> None:
    """Score a run's LoRA at several strengths: 0 is the model before training, 1 the trained one."""
    from flowalign.data import Prompts
    from flowalign.evaluation.strength import strength_curve

    factors = parse_strengths(strengths)
    for option, file in (("--film", film), ("--json", json_path)):
        if file is not None:
            check_output(file, option)
    judge = judge_of(run, None, panel, trust)
    settings = heldout_of(run, {"samples_per_prompt": pictures}, trust)
    policy, sampling = loaded(run, judge, trust, requested)
    if slider is not None:
        from flowalign.evaluation.slider import check_slider

        check_slider(slider, policy)
    print(f"{run}: {sampling.shown()}")
    prompts = Prompts.of(settings)
    curve = strength_curve(policy, judge, prompts, sampling, settings.samples_per_prompt, settings.seed, factors)
    judges = judges_of(run, None, panel)
    cards = {f"{factor:g}": card_of(run, result, judges, requested) for factor, result in curve.results.items()}
    record = show(curve) | {"cards": cards}
    show_cards(cards)
    if film is not None:
        curve.film(4).save(film)
        print(f"film: {film}")
    if slider is not None:
        from flowalign.evaluation.slider import save

        results = {f"{factor:g}": result for factor, result in curve.results.items()}
        save(slider, "LoRA strength", results, ["reward", *shown_parts(curve)])
        print(f"flowalign gallery {slider}")
    if json_path is not None:
        write_atomically(json_path, json.dumps(record, indent=1) + "\n")


def parse_strengths(text: str) -> list[float]:
    """Read '0,0.5,1'.

    Raises:
        ConfigError: one is no finite number, or there are fewer than two.
    """
    try:
        factors = sorted({float(word) for word in text.split(",")})
    except ValueError:
        factors = []
    if len(factors) < 2 or not all(map(math.isfinite, factors)):
        raise ConfigError(f"--strengths {text}: give two numbers or more, e.g. 0,0.5,1,1.5")
    return factors


def shown_parts(curve: "StrengthCurve") -> list[str]:
    """Scores beside the reward: the share of samples that meet every requirement, where it has one, and the panel."""
    first = next(iter(curve.results.values()))
    return [name for name in first.parts if name == "strict" or name.startswith("panel/")]


def show(curve: "StrengthCurve") -> dict[str, Any]:
    """Print a table with a row for each strength and which is best; return its figures."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from flowalign.evaluation.statistics import estimate

    first = next(iter(curve.results.values()))
    parts = shown_parts(curve)
    with_pictures = not isinstance(first.samples[0], str | list)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for heading in ("strength", "reward", *parts, *(["diversity"] if with_pictures else [])):
        table.add_column(heading, justify="right")
    rows = []
    for factor, result in curve.results.items():
        columns = {"reward": result.value, **{name: result.parts[name] for name in parts}}
        means = {name: estimate(values, result.prompts) for name, values in columns.items()}
        row = {name: None if found is None else vars(found) for name, found in means.items()}
        cells = ["" if found is None else f"{found}" for found in means.values()]
        distance = {"diversity": curve.diversity(factor)} if with_pictures else {}
        table.add_row(f"{factor:g}", *cells, *(f"{value}" for value in distance.values()))
        apart = {name: vars(value) for name, value in distance.items()}
        rows.append({"strength": factor, **row, **apart})
    Console().print(table)
    alike = curve.as_good()
    others = ", ".join(f"{factor:g}" for factor in alike if factor != curve.best)
    told = f"these samples cannot tell it from {others}" if others else "it is above all others beyond its error"
    print(f"highest reward at strength {curve.best:g}; {told}")
    return {"strengths": rows, "best": curve.best, "as_good": alike}
