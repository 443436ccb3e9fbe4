"""`flowalign soup`: one LoRA of several runs'."""

import itertools
import json
import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowalign.app.cli.evaluate import (
    Json,
    Pictures,
    Trust,
    card_of,
    check_sampling,
    heldout_of,
    judge_of,
    judges_of,
    labels_of,
    show_cards,
)
from flowalign.app.cli.modules import opened
from flowalign.errors import ConfigError
from flowalign.runs.files import check_output, write_atomically, write_folder

if TYPE_CHECKING:
    from flowalign.evaluation.scores import Evaluated
    from flowalign.policies.soup import Soup
    from rewards import Reward


def soup(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN RUN...", help="Folders of runs of one model, each with a LoRA.")
    ],
    shares: Annotated[
        str | None, typer.Option(help="Write the LoRA of these shares, one a run, e.g. 0.5,0.5; needs --out.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A new folder for the LoRA.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Without --shares: score the mixtures in this many steps.")] = 4,
    slider: Annotated[
        Path | None, typer.Option(help="Write a folder whose page in the gallery has a slider of the mixtures.")
    ] = None,
    any_sampling: Annotated[
        bool, typer.Option("--any-sampling", help="Score also runs that sample in other ways, all as the first does.")
    ] = False,
    pictures: Pictures = None,
    json_path: Json = None,
    trust: Trust = False,
) -> None:
    """Mix the LoRAs of several runs: score mixtures by the runs' rewards, or write the LoRA of one mixture."""
    from flowalign.app.loading import load_for_sampling
    from flowalign.policies.soup import Soup

    chosen = None if shares is None else parse_shares(shares, len(runs))
    _check_outputs(chosen, out, slider, json_path)
    paths = loras(runs, trust)
    if chosen is None and not any_sampling:
        check_sampling(runs, trust)
    with opened(runs[0], trust):
        policy, sampling = load_for_sampling(str(runs[0]), None, "float32", trained=False)
        mixed = Soup(policy, paths)
    if chosen is not None and out is not None:
        write_folder(out, partial(mixed.save, shares=chosen))
        print(f"lora: {out}")
        return
    if slider is not None:
        from flowalign.evaluation.slider import check_slider

        check_slider(slider, policy)
    heldout = heldout_of(runs[0], {"samples_per_prompt": pictures}, trust)
    judges = [judge_of(run, None, None, trust) for run in runs]
    names = labels_of(runs)
    labels, results = measured(mixed, judges, heldout, sampling, steps)
    # one protocol for all mixtures: the first run's prompts and sampling, the rewards of all
    judged = [judge for run in runs for judge in judges_of(run, None, None)]
    cards = {", ".join(f"{share:g}" for share in shares): card_of(runs[0], one, judged, {}) for shares, one in results}
    record = show(labels, results, names) | {"cards": cards}
    show_cards(cards)
    if slider is not None:
        from flowalign.evaluation.slider import save

        def mixture(shares: list[float]) -> str:
            return ", ".join(f"{share:.2g} {name}" for share, name in zip(shares, names, strict=True))

        save(slider, "mixture", {mixture(shares): result for shares, result in results}, labels)
        print(f"flowalign gallery {slider}")
    if json_path is not None:
        write_atomically(json_path, json.dumps(record, indent=1) + "\n")


def _check_outputs(chosen: list[float] | None, out: Path | None, slider: Path | None, json_path: Path | None) -> None:
    """Refuse options that do not go together, and files that cannot be written."""
    if (chosen is None) != (out is None):
        raise ConfigError("--shares and --out go together: the shares of the LoRA that is written, and where to")
    if out is not None and out.exists():
        raise ConfigError(f"--out: {out} is there already; name a new folder")
    for option, file in (("--out", out), ("--json", json_path)):
        if file is not None:
            check_output(file, option, folder=option == "--out")
    if slider is not None and chosen is not None:
        raise ConfigError("--slider: shows the mixtures that are scored; leave --shares out")


def loras(runs: list[Path], trust: bool) -> list[Path]:
    """The folder of each run's LoRA.

    Raises:
        ConfigError: fewer than two runs, a run without a LoRA, or runs of other models.
    """
    from flowalign.config import load
    from flowalign.runs.result import Result

    if len(runs) < 2:
        raise ConfigError("a soup is of two runs or more")
    models, paths = [], []
    for run in runs:
        with opened(run, trust, ()):
            models.append(load(run / "config.yaml").model.path)
        lora = Result(run).lora
        if lora is None:
            raise ConfigError(f"{run} has no LoRA; a soup mixes those of finished runs with model.lora")
        paths.append(lora)
        if models[-1] != models[0]:
            raise ConfigError(f"{runs[0]} trained {models[0]}, {run} {models[-1]}; a soup is of one model")
    return paths


def parse_shares(text: str, members: int) -> list[float]:
    """Read '0.5,0.5'.

    Raises:
        ConfigError: there is not one finite number a run.
    """
    try:
        shares = [float(word) for word in text.split(",")]
    except ValueError:
        shares = []
    if len(shares) != members or not all(map(math.isfinite, shares)):
        raise ConfigError(f"--shares {text}: give {members} numbers with commas, one a run")
    return shares


def measured(
    mixed: "Soup", judges: "list[Reward]", heldout: Any, sampling: Any, steps: int
) -> "tuple[list[str], list[tuple[list[float], Evaluated]]]":
    """The names of the judges' rewards in the results, and the shares of each mixture with its result."""
    from flowalign.data import Prompts
    from flowalign.evaluation.scores import evaluate
    from flowalign.policies.soup import simplex
    from rewards import WeightedSum

    prompts, both = Prompts.of(heldout), WeightedSum(judges)
    results = []
    for shares in simplex(len(judges), steps):
        mixed.serve(shares)
        result = evaluate(mixed.policy, both, prompts, sampling, heldout.samples_per_prompt, heldout.seed)
        results.append((shares, result))
    return list(both.labels), results


def show(labels: list[str], results: "list[tuple[list[float], Evaluated]]", names: list[str]) -> dict[str, Any]:
    """Print a table with a row for each mixture, and mark the Pareto front; return its figures."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from flowalign.evaluation.statistics import estimate
    from flowalign.policies.soup import front

    estimates: list[list[Any]] = [
        [estimate(result.parts[name], result.prompts) for name in labels] for _, result in results
    ]
    best = front([[reward.mean for reward in rewards] for rewards in estimates])
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for heading in itertools.chain(names, (f"reward of {name}" for name in names), ["front"]):
        table.add_column(heading, justify="right")
    rows = []
    for i, ((shares, _), rewards) in enumerate(zip(results, estimates, strict=True)):
        table.add_row(*(f"{share:.2f}" for share in shares), *(f"{reward}" for reward in rewards), "*" * (i in best))
        rows.append({"shares": shares, "rewards": [vars(reward) for reward in rewards], "front": i in best})
    Console().print(table)
    print("*: no other mixture has a higher mean in one reward and none lower in the others; look at the errors too")
    return {"runs": names, "mixtures": rows}
