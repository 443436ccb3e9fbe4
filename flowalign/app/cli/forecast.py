"""`flowalign forecast`: where a run's curve goes, and what the way takes."""

import json
import math
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowalign.app.cli.evaluate import Json, Trust
from flowalign.app.cli.modules import opened, quiet_libraries
from flowalign.app.cli.numbers import finite
from flowalign.errors import ConfigError
from flowalign.runs.files import check_output, write_atomically

if TYPE_CHECKING:
    from flowalign.config import BaseConfig
    from flowalign.evaluation.forecast import Forecast

PHASES = ("seconds/rollout", "seconds/reward", "seconds/update")


def forecast(
    run: Annotated[Path, typer.Argument(help="A run's folder; it may still be training.")],
    target: Annotated[float | None, typer.Option(callback=finite, help="Score to reach.")] = None,
    iterations: Annotated[
        int | None, typer.Option(min=1, help="Iteration to look at; default the run's last, or twice what it has.")
    ] = None,
    score: Annotated[str, typer.Option(help="The held-out reward, or one of its parts, e.g. strict.")] = "reward",
    training: Annotated[bool, typer.Option("--training", help="Fit the mean rewards of training instead.")] = False,
    most: Annotated[
        float | None, typer.Option(callback=finite, help="Largest score that there is, e.g. 1; default none.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Plan the hours for this GPU (h200, h100, ...) instead.")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs of the plan.")] = 1,
    json_path: Json = None,
    trust: Trust = False,
) -> None:
    """Fit a run's curve of scores, and say where it goes and how long that takes; 'cannot tell' with few points."""
    from flowalign.config import load
    from flowalign.evaluation.forecast import FEWEST, curve_of
    from flowalign.evaluation.forecast import forecast as fit
    from flowalign.runs.result import Result

    if json_path is not None:
        check_output(json_path, "--json")
    with opened(run, trust, ()):
        config = load(run / "config.yaml")
        result = Result(run)
        records = result.metrics
    key = f"reward/{'mean' if score == 'reward' else score}" if training else f"all/{score}"
    done, values = curve_of(records if training else result.evaluations, key)
    if not done:
        raise ConfigError(f"{run} has no {key}; {_names(records if training else result.evaluations, training)}")
    last = records[-1]["iteration"] + 1 if records else done[-1]
    until = iterations or (config.training.iterations if config.training.iterations > last else 2 * last)
    curve = fit(done, values, math.inf if most is None else most)
    print(f"{run}: {key} at {len(done)} points, {values[0]:.3f} at {done[0]}, {values[-1]:.3f} at {done[-1]}")
    record: dict[str, Any] = {"points": len(done), "score": key, "until": until}
    if curve is None:
        more = "" if training else "; --training looks at the mean reward of each iteration"
        print(f"cannot tell: {FEWEST} points or more that differ are needed{more}")
    else:
        record |= show(curve, until, target)
    seconds = _seconds(config, records, gpu, gpus)
    if seconds is not None:
        record |= {"seconds": seconds, "hours": hours(seconds, until, last, gpu, gpus)}
    if json_path is not None:
        write_atomically(json_path, json.dumps(record, indent=1) + "\n")


def show(curve: "Forecast", until: int, target: float | None) -> dict[str, Any]:
    """Print where the curve goes; an interval that is too wide says nothing. Infinity is null in the record."""
    end, level = curve.at(until), curve.level()
    for name, interval in ((f"at iteration {until}", end), ("plateau", level)):
        known = "" if curve.tells(interval) else "cannot tell: "
        print(f"{name}: {known}{interval} (95% interval)")
    record = {"end": vars(end), "plateau": vars(level)}
    if target is None:
        return record
    reached = curve.reached(target)
    assert reached.low is not None and reached.high is not None
    if math.isinf(reached.low):
        print(f"{target:g} is not reached, as far as the curve tells")
    elif math.isinf(reached.mean):
        print(f"{target:g}: more likely never than ever, and not before iteration {reached.low:.0f} (95% interval)")
    else:
        late = "perhaps never" if math.isinf(reached.high) else f"{reached.high:.0f}"
        print(f"{target:g}: at iteration {reached.mean:.0f} (95% interval: {reached.low:.0f} to {late})")
    return record | {"target": {name: None if math.isinf(value) else value for name, value in vars(reached).items()}}


def _seconds(config: "BaseConfig", records: list[dict[str, Any]], gpu: str | None, gpus: int) -> float | None:
    """Seconds of an iteration: planned for a GPU, or the run's median; None where it has no metrics."""
    if gpu is not None:
        from flowalign.planning.plan import plan

        quiet_libraries()
        planned = plan(config, gpu.lower(), gpus)
        return median(planned.seconds.values())
    spent = [sum(record.get(phase, 0.0) for phase in PHASES) for record in records]
    return median(spent) if spent else None


def hours(seconds: float, until: int, last: int, gpu: str | None, gpus: int) -> float:
    """Print and return the hours of the iterations that are left, without evaluations."""
    left = max(until - last, 0)
    spent = seconds * left / 3600
    where = "here" if gpu is None else f"on {gpus} {gpu}, {spent * gpus:.3g} GPU hours"
    print(f"{left} more iterations of {seconds:.3g} seconds: {spent:.3g} hours {where}, without evaluations")
    return spent


def _names(records: list[dict[str, Any]], training: bool) -> str:
    """Names of the scores that a run has."""
    prefix = "reward/" if training else "all/"
    names = sorted({key.removeprefix(prefix) for record in records for key in record if key.startswith(prefix)})
    return f"--score: {', '.join(names)}" if names else "it was not evaluated (evaluation.prompts); try --training"
