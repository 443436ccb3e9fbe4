"""Numbers of the command line."""

import math

import typer


def finite(value: float | None) -> float | None:
    """Callback of all options of floats, since typer itself accepts 'inf' and 'nan'."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter("a finite number is wanted")
    return value
