"""Where a user's own modules are found, that they do not hide flowalign's, and what other libraries print."""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from flowalign.errors import ConfigError

HOME = Path(__file__).parents[3]
"""Folder of the packages flowalign, rewards and samplers."""


def check_own_packages() -> None:
    """Take the current folder, which `python -m` puts first, off the path: `find_beside` puts it last, where it may.

    Raises:
        ConfigError: another file has the name of one of them.
    """
    for entry in ("", str(Path.cwd())):
        if sys.path[0] == entry and Path.cwd() != HOME:
            sys.path.pop(0)
    for name in ("rewards", "samplers"):
        found = importlib.util.find_spec(name)
        if found is not None and found.origin is not None and Path(found.origin).parents[1] != HOME:
            raise ConfigError(f"{found.origin} hides flowalign's own package '{name}'; give your file another name")


def find_beside(file: Path) -> None:
    """Let dotted paths name modules beside a file and in the current folder, after all others."""
    for folder in (file.resolve().parent, Path.cwd()):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


def keep_off(run: Path) -> None:
    """Take a run's folder off the path: torch, accelerate and peft import optional packages by their names from it."""
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != run.resolve()]


@contextlib.contextmanager
def opened(model: str | Path, trust: bool, used: Sequence[str] = ("model", "algorithm")) -> Iterator[None]:
    """Within it the folder of a run is data, for somebody else may have made it; trusted, its code may run.

    Args:
        model: a run's folder; others are models.
        used: sections of its configuration that are used.

    Raises:
        ConfigError: the folder reaches outside itself, and --trust would allow that.
    """
    run = Path(model)
    if trust:
        find_beside(run / "config.yaml")
        yield
        return
    keep_off(run)
    from flowalign.config.foreign import check_run
    from flowalign.registry import only_ours

    if (run / "config.yaml").is_file():
        check_run(run, used)
    with only_ours(run / "config.yaml"):
        yield


def quiet_libraries() -> None:
    """No loading bars and no warnings of diffusers and transformers, where random weights stand in for real ones."""
    import diffusers
    import transformers

    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
