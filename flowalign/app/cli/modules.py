"""The path of a user's own modules, which must not hide flowalign's, and the output of other libraries."""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from flowalign.errors import ConfigError

HOME = Path(__file__).parents[3]
"""Folder of the packages flowalign, rewards and samplers."""


def check_own_packages() -> None:
    """Remove the current folder from the start of the path, where `python -m` puts it; `find_beside` appends it.

    Raises:
        ConfigError: another file has the name of one of flowalign's packages.
    """
    for entry in ("", str(Path.cwd())):
        if sys.path[0] == entry and Path.cwd() != HOME:
            sys.path.pop(0)
    for name in ("rewards", "samplers"):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None and Path(spec.origin).parents[1] != HOME:
            raise ConfigError(f"{spec.origin} hides flowalign's own package '{name}'; give your file another name")


def find_beside(file: Path) -> None:
    """Let dotted paths name modules in a file's folder and in the current one, after all other modules."""
    for folder in (file.resolve().parent, Path.cwd()):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


def keep_off(run: Path) -> None:
    """Remove a run's folder from the path: torch, accelerate and peft would import optional packages from it."""
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != run.resolve()]


@contextlib.contextmanager
def opened(model: str | Path, trust: bool, used: Sequence[str] = ("model", "algorithm")) -> Iterator[None]:
    """Context in which a run's folder, which anybody may have made, is only data; with `trust` its code may run.

    Args:
        model: a run's folder; a model's folder or name has no configuration to check.
        used: sections of its configuration that the caller uses.

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
    """Turn off bars and warnings of diffusers and transformers, for random weights instead of real ones."""
    import diffusers
    import transformers

    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
