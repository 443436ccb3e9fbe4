"""Numbers of the command line."""

import math

import typer


def finite(value: float | None) -> float | None:
    """The callback of every option that is a float: typer itself takes 'inf' and 'nan'."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter("a finite number is wanted")
    return value
