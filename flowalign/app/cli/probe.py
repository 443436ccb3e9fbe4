"""`flowalign probe`: will a configuration learn?"""

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowalign.app.cli.evaluate import Json
from flowalign.app.cli.modules import find_beside, quiet_libraries
from flowalign.app.cli.numbers import finite
from flowalign.runs.files import check_output, write_atomically

if TYPE_CHECKING:
    from flowalign.evaluation.statistics import Interval
    from flowalign.planning.probed import Probe, Trial


def probe(
    config: Annotated[Path, typer.Argument(help="YAML configuration, or the name of a recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    iterations: Annotated[int, typer.Option(min=1, help="Iterations of a trial.")] = 12,
    prompts: Annotated[int, typer.Option(min=2, help="Training prompts on which a trial is judged.")] = 48,
    samples: Annotated[int, typer.Option(min=2, help="Samples of each of them.")] = 4,
    target: Annotated[
        float | None, typer.Option(callback=finite, help="Reward to reach, to say how long it takes.")
    ] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="Only fit the model to its own samples, before nft, awm or raft.")
    ] = False,
    json_path: Json = None,
) -> None:
    """Say if a configuration will learn, and what to change: short trials whose weights are dropped."""
    from flowalign.config import load
    from flowalign.config.loader import world_size
    from flowalign.errors import ConfigError
    from flowalign.planning.probe import own_fit
    from flowalign.planning.probe import probe as measure
    from flowalign.planning.probed import fit_advice, plain

    if json_path is not None:
        check_output(json_path, "--json")
    if world_size() > 1:
        raise ConfigError("a probe runs in one process; without accelerate launch it works")
    find_beside(config)
    quiet_libraries()
    settings = load(config, overrides or [])

    if fit:
        fitted, aimless = own_fit(settings, iterations, prompts, samples)
        print(_trial("fitted to its own samples", fitted), _trial("without a direction", aimless), sep="\n")
        warnings = fit_advice(fitted, aimless)
        print(*(f"- {line}" for line in warnings or ["matching alone hardly changes the model"]), sep="\n")
        if json_path is not None:
            record: dict[str, Any] = {"fit": plain(fitted), "aimless": plain(aimless), "advice": warnings}
            write_atomically(json_path, json.dumps(record, indent=1) + "\n")
        return

    def tell(phase: str) -> None:
        print(f"{phase} ...", file=sys.stderr, flush=True)

    found = measure(settings, iterations, prompts, samples, tell)
    show(found, target)
    if json_path is not None:
        pace = None if target is None else found.iterations_to(target)
        ends = pace and {name: None if value == math.inf else value for name, value in vars(pace).items()}
        record = found.record() | ({} if target is None else {"iterations_to_target": ends})
        write_atomically(json_path, json.dumps(record, indent=1) + "\n")


def show(found: "Probe", target: float | None = None) -> None:
    """Print the measurements, the verdict and the advice; intervals are of 95%."""
    start, gradient = found.start, found.gradient
    if start is not None:
        dead = f"{start.dead.mean:.0%} of {start.groups} dead ({start.dead.low:.0%} to {start.dead.high:.0%})"
        print(f"groups of {start.size}: spread of the reward {start.within}; {dead}")
    for step, spread in found.by_step.items():
        mark = " (configured)" if step in found.noisy_steps else ""
        print(f"  noise in step {step} alone: {spread.within}; {_shares(spread.dead)} dead{mark}")
    for name, size in found.reward_noise.items():
        print(f"noise of the reward, {name}: {_shares(size)} of that spread")
    if gradient is None:
        print("gradient: 0")
    else:
        scale = gradient.scale
        ends = "no bound" if scale.high is None else f"{scale.high:.0f}"
        bound = "cannot tell" if scale.low is None else f"{scale.low:.0f} to {ends} groups"
        print(f"gradient: signal over noise of an update of {gradient.groups} groups {_range(gradient.signal)}")
        print(f"  cosine of two halves {_range(gradient.cosine)}; noise as large as the signal: {bound}")
    if found.first_step is not None:
        print(f"first update: lowers the loss of other groups by {_range(found.first_step)}")
    clipped = "" if found.trial.clipped is None else f", {found.trial.clipped:.1%} of the ratios clipped"
    print(f"{_trial('trial', found.trial)}{clipped}")
    print(_trial("four times the rate", found.stress))
    if found.canary is not None:
        sure = "it passes" if found.canary.learned else "it was not seen to pass"
        print(f"{_trial('canary, another reward', found.canary)}; {sure}")
    if found.own_fit is not None:
        print(_trial("fitted to its own samples", found.own_fit))
    if found.aimless is not None:
        print(_trial("  as many updates without a direction", found.aimless))
    if target is not None:
        print(f"to {target:g}: {_pace(found, target)}")
    print(f"{sum(found.seconds.values()):.0f} seconds")
    print(f"verdict: {found.verdict}{''.join(f'; {cause}' for cause in found.dead())}")
    for line in found.advice():
        print(f"- {line}")


def _trial(name: str, trial: "Trial") -> str:
    if trial.failure is not None:
        return f"{name}: {trial.rate:g} ended with an error: {trial.failure}"
    return (
        f"{name}: {trial.iterations} iterations at {trial.rate:g}: reward {trial.before:.3f}, gain {trial.gain:+}; "
        f"samples moved by {trial.moved}"
    )


def _pace(found: "Probe", target: float) -> str:
    """Time to the target by the fit to the trial."""
    pace = found.iterations_to(target)
    if pace is None:
        return "cannot tell, since the trial shows no gain that reaches it"
    assert pace.low is not None and pace.high is not None

    def say(iterations: float) -> str:
        hours = iterations * found.trial.seconds / 3600
        return "no bound" if iterations == math.inf else f"{iterations:.0f} ({hours:.2g} hours here)"

    return f"iteration {say(pace.mean)}, from {say(pace.low)} to {say(pace.high)}, by a fit to the trial"


def _shares(size: "Interval") -> str:
    return f"{size.mean:.0%} ({size.low:.0%} to {size.high:.0%})"


def _range(size: "Interval") -> str:
    return f"{size.mean:.2g} [{size.low:.2g}, {size.high:.2g}]"
