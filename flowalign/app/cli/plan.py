"""`flowalign plan`: memory, time and cost of a run, before any GPU is paid for."""

import atexit
import contextlib
import gc
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from flowalign.app.cli.modules import find_beside, quiet_libraries
from flowalign.app.cli.numbers import finite
from flowalign.errors import ConfigError

if TYPE_CHECKING:
    from flowalign.planning.resources import RunPlan


def plan(
    config: Annotated[Path, typer.Argument(help="YAML configuration, or the name of a recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs of the run.")] = 1,
    gpu: Annotated[str, typer.Option(help="h200, h100, a100, l40s, rtx4090, ...")] = "h100",
    price: Annotated[float | None, typer.Option(min=0, callback=finite, help="Price of an hour of one GPU.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every figure as JSON.")] = False,
) -> None:
    """Estimate memory, operations, time and GPU hours of a run, without weights, a GPU or a network."""
    from flowalign.config import load
    from flowalign.planning.plan import plan as make_plan
    from flowalign.planning.rates import rate_notes

    find_beside(config)
    quiet_libraries()
    wanted = load(config, overrides or [])
    # garbage is collected before each measurement, and need not be looked for in torch and diffusers each time
    gc.freeze()
    atexit.register(gc.unfreeze)
    planned = make_plan(wanted, gpu.lower(), gpus, price)
    # a recipe that is none without the overrides has no rate to compare with
    with contextlib.suppress(ConfigError):
        planned.notes = [*planned.notes, *rate_notes(load(config), wanted)]
    if as_json:
        print(json.dumps(planned.json(), indent=1))
    else:
        show(planned, price)


def show(planned: "RunPlan", price: float | None = None) -> None:
    """Print the plan as tables; `price` is that of an hour of one GPU."""
    console = Console(soft_wrap=True, highlight=False)
    costs = planned.costs
    sizes = ", ".join(f"{name} {count / 1e9:.3g}B" for name, count in costs.parameters.items())
    console.print(f"{planned.model}: {sizes}; {costs.trained / 1e6:.4g}M trained")
    table = Table(title=f"GiB on each {planned.gpu}, {planned.usable:.0f} usable", title_justify="left")
    components = list(dict.fromkeys(component for phase in planned.memory.values() for component in phase))
    for column in ("", *planned.memory):
        table.add_column(column, justify="right" if column else "left")
    for component in components:
        table.add_row(
            component, *(f"{phase[component]:.2f}" if component in phase else "" for phase in planned.memory.values())
        )
    table.add_row("together", *(f"{sum(phase.values()):.2f}" for phase in planned.memory.values()), style="bold")
    console.print(table)
    table = Table(title=f"An iteration on {planned.gpus} {planned.gpu}", title_justify="left")
    for column in ("", "operations", *(f"seconds at {share} of the peak" for share in planned.seconds)):
        table.add_column(column, justify="right" if column else "left")
    for phase, flops in [*planned.flops.items(), ("together", sum(planned.flops.values()))]:
        spent = (f"{planned.phases[share].get(phase, whole):.3g}" for share, whole in planned.seconds.items())
        table.add_row(phase, _operations(flops), *spent, style="bold" if phase == "together" else None)
    console.print(table)
    for share, hours in planned.gpu_hours.items():
        cost = "" if price is None else f" = {planned.price[share]:,.0f} at {price:g} an hour"
        speed = f"{planned.pictures_per_hour[share]:,.0f} samples an hour"
        console.print(f"at {share} of the peak: {speed}; the run takes {hours:,.3g} GPU hours{cost}")
    fits = planned.peak <= planned.usable
    console.print(
        f"largest batches that fit: training.micro_batch_size {planned.largest_micro_batch}, rollout.batch_size "
        f"{planned.largest_rollout_batch}"
    )
    console.print("it fits as it is" if fits else f"it does not fit; set: {'; '.join(planned.advice)}")
    for note in planned.notes:
        console.print(note)


def _operations(flops: float) -> str:
    """Operations in the unit that leaves few digits."""
    units = ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"]
    power = min(int(math.log10(max(flops, 1)) // 3), len(units) - 1)
    return f"{flops / 1000**power:.3g} {units[power]}"
