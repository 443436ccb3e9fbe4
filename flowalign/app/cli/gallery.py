"""`flowalign gallery`: pages of runs, with voting."""

import os
import sqlite3
from pathlib import Path
from typing import Annotated

import typer

from flowalign.app.cli.modules import keep_off
from flowalign.errors import ConfigError
from flowalign.runs.files import check_output
from flowalign.runs.foreign import check_folder, inside


def gallery(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN [RUN ...]", help="Run folders.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the gallery; default 'gallery' in the run's.")
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Serve it on this machine, with voting.")] = False,
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond loopback, everybody who reaches it can look and vote.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8765,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the votes so far as preferences (JSON lines), and exit.")
    ] = None,
) -> None:
    """Build a page that shows how runs changed the pictures; it opens from disk, and takes votes when it is served."""
    for run in runs:
        keep_off(run)
    folder = output or inside(_beside(runs), "gallery")
    try:
        _show(runs, folder, serve, host, port, export)
    except sqlite3.DatabaseError as error:
        raise ConfigError(f"{folder / 'votes.sqlite'} is no file of votes: {error}; --output names another") from error


def _show(runs: list[Path], folder: Path, serve: bool, host: str, port: int, export: Path | None) -> None:
    from flowalign.app.gallery.build import build
    from flowalign.app.gallery.votes import failed
    from flowalign.data.votes import Votes
    from flowalign.evaluation.voting import fails

    if export is not None:
        if not (folder / "votes.sqlite").is_file():
            raise ConfigError(f"no votes in {folder}; --serve takes them, and --output names another gallery")
        # the votes' file may be a link to another program's
        check_folder(folder)
        check_output(export, "--export")
        votes = Votes(folder / "votes.sqlite")
        print(f"{votes.export(export, runs)} preferences: {export}")
        raters = [line["rater"] for line in votes.preferences()]
        for rater, (right, pairs) in votes.caught().items():
            if fails(right, pairs):
                print(failed(rater, right, pairs, raters.count(rater)))
    elif serve:
        try:
            from flowalign.app.gallery.server import serve as run_server
        except ModuleNotFoundError as error:
            raise ConfigError(f"--serve needs {error.name}; pip install 'flowalign[serve]'") from error
        run_server(runs, folder, host, port)
    else:
        print(f"gallery: {build(runs, folder).resolve()}")


def _beside(runs: list[Path]) -> Path:
    """The run's folder, or the common folder of all runs."""
    paths = [run.resolve() for run in runs]
    return paths[0] if len(paths) == 1 else Path(os.path.commonpath([path.parent for path in paths]))
