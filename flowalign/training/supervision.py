"""What watches over a run while it trains: its lock, signals, other processes, and errors that end it for people."""

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

import torch

from flowalign.errors import FlowalignError
from flowalign.runs.lock import locked
from flowalign.training.assembly import Parts
from flowalign.training.distributed.heartbeat import Heartbeat
from flowalign.training.memory import out_of_memory, while_it_fits
from flowalign.training.signals import Signals, Stopped, no_silent_exit

T = TypeVar("T")
LOST = re.compile("gloo|nccl|connection|timed? ?out", re.IGNORECASE)
"""Words in the communication libraries' errors when a process is gone or late."""


class Supervision:
    """Within it a run trains; an error of the world around it leaves it as one line.

    Args:
        parts: of the run.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.signals = Signals(announce=parts.accelerator.is_main_process)
        self.heartbeat: Heartbeat | None = None
        """Sign of life to the other processes, where there are some."""
        self.iteration = 0
        self._folder: tuple[int, int] | None = None
        """Device and number of the run's folder, while this process writes into it."""

    def at(self, iteration: int, place: str) -> None:
        """Told where the run is."""
        self.iteration = iteration
        if self.heartbeat is not None:
            self.heartbeat.place = f"iteration {iteration}, {place}"
        if self._folder is not None and self._folder != _identity(self.parts.folder):
            raise FlowalignError(
                f"{self.parts.folder} was moved or removed while it was trained; moved back, --resume goes on from its "
                "last checkpoint"
            )

    def leave_if_asked(self, iteration: int, save: Callable[[], None]) -> None:
        """Save and leave where a signal came to any process.

        Raises:
            Stopped: one came.
        """
        if not self.parts.processes.maximum(self.signals.received is not None):
            return
        save()
        received = self.signals.received or "a signal to another process"
        raise Stopped(
            f"{received}: left after {iteration} of {self.parts.config.training.iterations} iterations; "
            f"--resume goes on from {self.parts.folder}"
        )

    def while_it_fits(self, sample: Callable[[], T]) -> T:
        """The result of sampling, again with smaller network calls where memory runs out and nobody waits for it."""
        processes, replicated = self.parts.processes, self.parts.learner.replicated
        begun = processes.exchanges

        def by_itself() -> bool:
            copied = replicated and processes.columns == 1
            return processes.accelerator.num_processes == 1 or (copied and processes.exchanges == begun)

        return while_it_fits(self.parts.config, "rollout", "batch_size", sample, by_itself)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it the run has its folder for itself, and its errors name what would help.

        Raises:
            FlowalignError: another process is gone, or did not come in time; says where each was.
        """
        accelerator, config = self.parts.accelerator, self.parts.config
        lock = locked(self.parts.folder) if accelerator.is_main_process else nullcontext()
        try:
            with lock, self.signals, no_silent_exit(), self._among_others():
                self._folder = _identity(self.parts.folder) if accelerator.is_main_process else None
                yield
        except torch.OutOfMemoryError as error:
            raise FlowalignError(out_of_memory(config, accelerator.num_processes)) from error
        except SystemExit as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            raise FlowalignError(
                f"iteration {self.iteration}: {where.filename}, line {where.lineno}, called sys.exit({error.code!r}), "
                "which would pass for the end of the run"
            ) from error
        finally:
            self._folder = None
            if self.parts.fleet is not None:
                self.parts.fleet.close()

    @contextmanager
    def _among_others(self) -> Iterator[None]:
        """Within it the other processes hear of this one, and are named where they are gone."""
        accelerator = self.parts.accelerator
        if accelerator.num_processes == 1:
            yield
            return
        store = torch.distributed.distributed_c10d._get_default_store()
        world = accelerator.process_index, accelerator.num_processes
        self.heartbeat = Heartbeat(store, *world, self.parts.config.training.patience)
        try:
            yield
        except RuntimeError as error:
            if not LOST.search(str(error)):
                raise
            reason = str(error).strip().splitlines()[-1]
            raise FlowalignError(
                f"process {world[0]} lost another one ({reason}). {self.heartbeat.others()}. --resume goes on from the "
                "run's last checkpoint; training.timeout is how long processes wait for each other"
            ) from error
        finally:
            self.heartbeat.stop()


def _identity(folder: Path) -> tuple[int, int] | None:
    """Device and number of a folder, which it keeps when it is moved; None where there is none."""
    try:
        found = folder.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
