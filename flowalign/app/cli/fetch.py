"""`flowalign fetch`: what a configuration takes from the hub, listed or loaded."""

from pathlib import Path
from typing import Annotated

import typer

from flowalign.app.cli.modules import find_beside
from flowalign.errors import ConfigError


def fetch(
    config: Annotated[Path, typer.Argument(help="YAML configuration, or the name of a recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Say what is there and what is missing; load nothing.")
    ] = False,
) -> None:
    """Load the model, rewards, panel and prompts that a configuration takes from the Hugging Face hub."""
    from flowalign.config import load
    from flowalign.planning import downloads as hub

    find_beside(config)
    needed = hub.downloads(load(config, overrides or []))
    lacking = [one for one in needed if hub.here(one) is None]
    if lacking and hub.offline() and not check:
        names = ", ".join(one.repository for one in lacking)
        raise ConfigError(f"offline, and not on this machine: {names}; run this where there is a network")
    asks = not hub.offline()
    for one in needed if check else lacking:
        size = None
        if asks:
            try:
                size = hub.size(one)
            except hub.Unreachable as error:
                if not check:
                    raise
                # once is enough
                asks = False
                print(f"the hub does not answer, so sizes are not known: {error}")
        told = "" if size is None else f", {size.gigabytes:.2f} GB, licence {size.licence}"
        state = "missing" if one in lacking else "here"
        print(f"{state:<8} {one.repository} ({one.part}) for {one.needed_by}{told}")
        if not check and size is not None:
            hub.get(one, size.files)
    if check and lacking:
        raise typer.Exit(1)
    print("everything is here" if needed else f"{config} takes nothing from the hub")
