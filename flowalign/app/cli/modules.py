"""Where a user's own modules are found, that they do not hide flowalign's, and what other libraries print."""

import importlib.util
import sys
from pathlib import Path

from flowalign.errors import ConfigError

HOME = Path(__file__).parents[3]
"""of the packages flowalign, rewards and samplers"""


def check_own_packages() -> None:
    """Find flowalign's packages before modules of the current folder, which `python -m` puts first.

    Raises:
        ConfigError: another file has the name of one of them.
    """
    for entry in ("", str(Path.cwd())):
        if sys.path[0] == entry and Path.cwd() != HOME:
            sys.path.append(sys.path.pop(0))
    for name in ("rewards", "samplers"):
        found = importlib.util.find_spec(name)
        if found is not None and found.origin is not None and Path(found.origin).parents[1] != HOME:
            raise ConfigError(f"{found.origin} hides flowalign's own package '{name}'; give your file another name")


def find_beside(file: Path) -> None:
    """Let dotted paths name modules beside a file and in the current folder, after all others."""
    for folder in (file.resolve().parent, Path.cwd()):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


def quiet_libraries() -> None:
    """No loading bars and no warnings of diffusers and transformers, where random weights stand in for real ones."""
    import diffusers
    import transformers

    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
