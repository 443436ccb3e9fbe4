"""`flowalign judge reliability`: how far a judge's verdicts can be trusted."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowalign.app.cli.evaluate import Json, Trust
from flowalign.app.cli.modules import find_beside, opened
from flowalign.errors import ConfigError
from flowalign.runs.files import check_output, write_atomically

if TYPE_CHECKING:
    from flowalign.evaluation.reliability import Reliability
    from flowalign.evaluation.statistics import Interval

judge = typer.Typer(help="Measure judges.", no_args_is_help=True)


@judge.callback()
def commands() -> None:
    """Measure judges."""


@judge.command()
def reliability(
    config: Annotated[Path, typer.Argument(help="YAML with `rewards`, or a training configuration.")],
    samples: Annotated[
        Path,
        typer.Argument(
            help="A run's folder, that of `flowalign pairs`, or JSON lines with a prompt and a picture (target) each, "
            "or preferences."
        ),
    ],
    draws: Annotated[int, typer.Option(min=2, help="Times that it is asked the same.")] = 3,
    wording: Annotated[
        list[str] | None, typer.Option(metavar="TEMPLATE", help="Ask with this template too; may stand several times.")
    ] = None,
    size: Annotated[
        list[float] | None, typer.Option(min=0.05, max=4, help="Ask about pictures of this size too; default 0.5.")
    ] = None,
    labels: Annotated[
        str | None, typer.Option(metavar="NAME", help="Score or field that says which samples are good, above 0.5.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=2, help="Prompts, spread over the samples.")] = 32,
    json_path: Json = None,
    trust: Trust = False,
) -> None:
    """Ask judges again, in the other order, in other words and about smaller pictures; compare them with labels."""
    from flowalign.app.cli.reward_file import read
    from flowalign.evaluation.reliability import measure
    from flowalign.registry import build

    if json_path is not None:
        check_output(json_path, "--json")
    find_beside(config)
    entries = read(config).rewards
    with opened(samples, trust, ()):
        pictures, texts, metadata, good = labelled_samples(samples, labels, prompts)
    records = {}
    for i, entry in enumerate(entries):
        if wording and "template" not in entry.settings:
            raise ConfigError(f"--wording: '{entry.name}' has no template, so nothing to ask in other words")
        where = f"rewards[{i}]"
        others = {
            name: build("rewards", entry.name, entry.settings | {"template": name}, where) for name in wording or ()
        }
        built = build("rewards", entry.name, entry.settings, where)
        sizes = [factor for factor in (size or [0.5]) if factor != 1]
        result = measure(built, pictures, texts, metadata, draws, sizes, others, good)
        show(result)
        records[result.name] = result.record()
    if json_path is not None:
        write_atomically(json_path, json.dumps(records, indent=1) + "\n")


def labelled_samples(
    source: Path, labels: str | None, prompts: int
) -> tuple[list[Any], list[str], list[dict[str, Any]], list[bool] | None]:
    """The newest samples of a folder, or those of a file: samples, prompts, metadata, and which are good.

    Raises:
        ConfigError: there are no samples, or some have no number under the labels' name.
    """
    from flowalign.app.gallery.runs import read_run
    from flowalign.data import Labels, Prompts, Targets
    from rewards.pictures import read_picture

    if source.is_dir():
        moments = [moment for moment in read_run(source, source.name).moments if moment.samples]
        if not moments:
            raise ConfigError(f"{source} has no samples; `flowalign pairs MODEL PROMPTS` makes some")
        rows = [(s.prompt, s.text or s.path, s.metadata, s.metadata | s.scores) for s in moments[-1].samples]
    else:
        first = Prompts.read(str(source)).metadata[0]
        known = "label" in first or {"chosen", "rejected"} <= first.keys()
        labels = labels or ("label" if known else None)
        listed = (Labels if labels == "label" else Targets).read(str(source))
        rows = [(t, Path(m["target"]), m, m) for t, m in zip(listed.texts, listed.metadata, strict=True)]
    distinct = list(dict.fromkeys(row[0] for row in rows))
    chosen = set(Prompts(distinct, [{} for _ in distinct]).spread(prompts).texts)
    rows = [row for row in rows if row[0] in chosen]
    good = None
    if labels is not None:
        values: list[Any] = [row[3].get(labels) for row in rows]
        if not all(isinstance(value, bool | int | float) for value in values):
            names = ", ".join(sorted(key for key, value in rows[0][3].items() if isinstance(value, bool | int | float)))
            raise ConfigError(
                f"--labels {labels}: not every sample has a number of this name; there are {names or 'none'}"
            )
        good = [bool(value > 0.5) for value in values]
    shown = [read_picture(sample) if isinstance(sample, Path) else sample for _, sample, *_ in rows]
    return shown, [row[0] for row in rows], [dict(row[2]) for row in rows], good


def show(result: "Reliability") -> None:
    """Print the figures of a judge, and what follows from them."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from flowalign.evaluation.reliability import RELIABLE

    print(f"{result.name}: {result.samples} samples of {result.prompts} prompts, asked {result.draws} times")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("verdicts of a prompt")
    for heading in ("deviation", "95%", "beyond that", "95%", "shift", "turned", "95%"):
        table.add_column(heading, justify="right")
    table.add_row("all", *ends(result.within))
    table.add_row("asked again", *ends(result.noise))
    for name, changed in result.disturbances.items():
        turned = f"{changed.turned.mean:.0%}", f"{changed.turned.low:.0%} to {changed.turned.high:.0%}"
        table.add_row(name, *ends(changed.noise), *ends(changed.beyond), f"{changed.shift.mean:+.3g}", *turned)
    Console().print(table)
    print("deviation: standard deviation of a prompt's verdicts, and of those of one sample when only this changes")
    print("beyond that: without the noise of asking again, which may be all of it where the interval begins at 0")
    print("shift: of the mean; turned: pairs of a prompt whose order changes")
    print(f"reliability of one verdict, the share of its variance that is not noise: {span(result.reliability)}")
    needed = result.needed
    if needed.high == float("inf"):
        least = "" if needed.low == float("inf") else f"; {needed.low:.0f} verdicts at least"
        print(f"cannot tell how many verdicts a sample needs: all their differences may be noise{least}")
    else:
        print(f"verdicts a sample for a reliability of {RELIABLE}: {span(needed)}")
    if result.prefers_first is not None:
        first = result.prefers_first
        print(f"prefers what comes first by {first.mean:+.1%} ({first.low:+.1%} to {first.high:+.1%})")
    if result.labels is not None:
        known = result.labels
        print(f"labels: {known.good:.0%} of {known.samples} samples are good; a good one is above a bad one in")
        print(f"  {known.auc.mean:.0%} ({known.auc.low:.0%} to {known.auc.high:.0%}) over all prompts (AUC)")
        if known.auc_in_groups is not None:
            inside = known.auc_in_groups
            print(f"  {inside.mean:.0%} ({inside.low:.0%} to {inside.high:.0%}) within a prompt")
        if known.brier is not None:
            print(f"  as a probability: Brier score {span(known.brier)}")
        for each in known.curve:
            share = f"{each['good']:.0%} ({each['low']:.0%} to {each['high']:.0%})"
            print(f"  verdicts of {each['mean']:.2f}: {share} of {each['samples']} are good")
    cost = f", {result.tokens:.0f} tokens" if result.tokens else ""
    print(f"cost of a verdict: {1000 * result.seconds:.1f} ms{cost}")


def ends(interval: "Interval") -> tuple[str, str]:
    """A figure and its interval as cells of a table."""
    return f"{interval.mean:.3g}", f"{interval.low:.3g} to {interval.high:.3g}"


def span(interval: "Interval") -> str:
    """A figure and its interval in a sentence."""
    return "{} ({})".format(*ends(interval))
