"""`flowalign fetch`: list or download the files that a configuration needs from the hub."""

from pathlib import Path
from typing import Annotated

import typer

from flowalign.app.cli.modules import find_beside
from flowalign.errors import ConfigError


def fetch(
    config: Annotated[Path, typer.Argument(help="YAML configuration, or the name of a recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="List what is there and what is missing; download nothing.")
    ] = False,
) -> None:
    """Download the model, rewards, panel and prompts that a configuration needs from the Hugging Face hub."""
    from flowalign.config import load
    from flowalign.planning import downloads as hub

    find_beside(config)
    needed = hub.downloads(load(config, overrides or []))
    lacking = [download for download in needed if hub.here(download) is None]
    if lacking and hub.offline() and not check:
        names = ", ".join(download.repository for download in lacking)
        raise ConfigError(f"offline, and not on this machine: {names}; run this where there is a network")
    online = not hub.offline()
    for download in needed if check else lacking:
        size = None
        if online:
            try:
                size = hub.size(download)
            except hub.Unreachable as error:
                if not check:
                    raise
                # the next downloads are not tried
                online = False
                print(f"the hub does not answer, so sizes are not known: {error}")
        details = "" if size is None else f", {size.gigabytes:.2f} GB, licence {size.licence}"
        state = "missing" if download in lacking else "here"
        print(f"{state:<8} {download.repository} ({download.part}) for {download.needed_by}{details}")
        if not check and size is not None:
            hub.get(download, size.files)
    if check and lacking:
        raise typer.Exit(1)
    print("everything is here" if needed else f"{config} takes nothing from the hub")
