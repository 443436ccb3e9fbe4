"""One training at a time in a run's folder."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from flowalign.errors import ConfigError
from flowalign.runs.foreign import check_folder


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Within it no other process trains into this folder. The lock ends with its process, however that ends.

    Raises:
        ConfigError: another process trains there, or it holds a link or a pipe.
    """
    if os.name != "posix":
        yield
        return
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    check_folder(folder)
    with open(folder / ".lock", "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise ConfigError(
                f"{folder} is being trained by process {file.read().strip()}; name=... starts another run"
            ) from error
        except OSError:
            # a file system without locks
            pass
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
