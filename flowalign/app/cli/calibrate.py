"""`flowalign rewards calibrate`: which reward of a sum decides, and weights for the shares asked for."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowalign.app.cli.modules import find_beside
from flowalign.errors import ConfigError
from flowalign.runs.files import check_output, write_atomically

if TYPE_CHECKING:
    from flowalign.evaluation.calibration import Calibration

rewards = typer.Typer(help="Measure rewards together.", no_args_is_help=True)


@rewards.callback()
def commands() -> None:
    """Measure rewards together."""


@rewards.command()
def calibrate(
    config: Annotated[Path, typer.Argument(help="YAML configuration with two rewards or more.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    shares: Annotated[
        str | None, typer.Option(help="Shares to print weights for, e.g. pick_score=0.5,ocr=0.5; default equal ones.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=2, help="Prompts, spread over the list.")] = 32,
    samples: Annotated[int, typer.Option(min=2, help="Samples per prompt.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first sample.")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Show scales and shares of a configuration's rewards on the start model's samples, and print weights as YAML."""
    from flowalign.config import load
    from flowalign.config.rewards import build_rewards
    from flowalign.data import Prompts
    from flowalign.evaluation.calibration import calibrate as measure
    from flowalign.policies.base import best_device
    from flowalign.training.building import build_policy

    asked = None if shares is None else parse_shares(shares)
    if json_path is not None:
        check_output(json_path, "--json")
    find_beside(config)
    settings = load(config, overrides or [])
    weights = [entry.weight for entry in settings.rewards]
    if len(weights) < 2:
        raise ConfigError(f"{config}: a calibration compares rewards, and `rewards` has {len(weights)}; name two")
    policy = build_policy(settings, best_device())
    listed = Prompts.of(settings.data).spread(prompts)
    found = measure(policy, build_rewards(settings.rewards), weights, listed, settings.rollout, samples, seed)
    show(found)
    spread = [name for name, scale in found.scales.items() if scale.within]
    record = found.record()
    if asked is not None or len(spread) == len(found.scales):
        record["weights"] = found.weights(asked or dict.fromkeys(spread, 1 / len(spread)))
        named = "equal shares" if asked is None else f"the shares {shares}"
        print(f"weights for {named}:", "rewards:", sep="\n")
        for entry, weight in zip(settings.rewards, record["weights"].values(), strict=True):
            print(f"  - {json.dumps(entry.model_dump() | {'weight': round(weight, 6)})}")
    if json_path is not None:
        write_atomically(json_path, json.dumps(record, indent=1) + "\n")


def parse_shares(text: str) -> dict[str, float]:
    """Read 'a=0.5,b=0.5'.

    Raises:
        ConfigError: a share is no number above 0.
    """
    shares = {}
    for entry in text.split(","):
        name, _, share = entry.partition("=")
        try:
            shares[name.strip()] = float(share)
        except ValueError:
            raise ConfigError(f"--shares: no number in {entry!r}; pick_score=0.5,ocr=0.5 works") from None
        if not 0 < shares[name.strip()] < float("inf"):
            raise ConfigError(f"--shares: {entry!r} is not above 0; pick_score=0.5,ocr=0.5 works")
    return shares


def show(found: "Calibration") -> None:
    """Print a table of the rewards, and a line about each that will surprise."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("reward")
    for heading in ("mean", "1%", "99%", "between", "within", "tail", "dead", "share", "95%"):
        table.add_column(heading, justify="right")
    for name, scale in found.scales.items():
        sizes = (scale.mean, scale.low, scale.high, scale.between, scale.within)
        shares = [f"{scale.share.mean:.0%}", f"{scale.share.low:.0%} to {scale.share.high:.0%}"]
        table.add_row(name, *(f"{size:.3g}" for size in sizes), f"{scale.tail:.1f}", f"{scale.dead:.0%}", *shares)
    Console().print(table)
    print("between, within: standard deviation of the prompts' means, and of a prompt's samples")
    print("dead: prompts whose samples all have one value")
    print("share: of the variance that groups learn from, with its 95% interval")
    names = list(found.scales)
    for k, (name, scale) in enumerate(found.scales.items()):
        if not scale.bounded:
            print(f"{name}: not in 0 to 1, so take it as unbounded; a bounded form of it is `rescaled`")
        if scale.tail > 3:
            print(f"{name}: few samples decide (tail {scale.tail:.1f})")
        if scale.share.high is not None and scale.share.high < 0.05:
            print(f"{name}: next to nothing is learned from it at this weight")
        for other in range(k):
            low, high = found.ends[:, k, other]
            same = "; they say the same" if abs(found.correlation[k, other]) > 0.9 else ""
            told = f"{found.correlation[k, other]:+.2f} ({low:+.2f} to {high:+.2f})"
            print(f"correlation of {names[other]} and {name} within prompts: {told}{same}")
