"""Supervision of a run while it trains: its lock, signals, other processes, and errors for people."""

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

import torch

from flowalign.errors import FlowalignError
from flowalign.runs.lock import locked
from flowalign.training.assembly import Components
from flowalign.training.distributed.heartbeat import Heartbeat
from flowalign.training.memory import out_of_memory, while_it_fits
from flowalign.training.signals import Signals, Stopped, no_silent_exit

T = TypeVar("T")
LOST = re.compile("gloo|nccl|connection|timed? ?out", re.IGNORECASE)
"""Words in errors of the communication libraries when a process is gone or late."""


class Supervision:
    """Supervises a run, and turns errors of its surroundings into one line for people.

    Args:
        components: all components of the run.
    """

    def __init__(self, components: Components) -> None:
        self.components = components
        self.signals = Signals(announce=components.accelerator.is_main_process)
        self.heartbeat: Heartbeat | None = None
        """Signs of life to the other processes, if there are any."""
        self.iteration = 0
        self._folder: tuple[int, int] | None = None
        """Device and inode of the run's folder, while this process writes into it."""

    def at(self, iteration: int, phase: str) -> None:
        """Note the iteration and phase of the run, and check that its folder is still there."""
        self.iteration = iteration
        if self.heartbeat is not None:
            self.heartbeat.phase = f"iteration {iteration}, {phase}"
        if self._folder is not None and self._folder != _identity(self.components.folder):
            raise FlowalignError(
                f"{self.components.folder} was moved or removed while it was trained; moved back, --resume goes on "
                "from its last checkpoint"
            )

    def leave_if_asked(self, iteration: int, save: Callable[[], None]) -> None:
        """Save and end the run if any process has received a signal.

        Raises:
            Stopped: a process has received one.
        """
        if not self.components.processes.maximum(self.signals.received is not None):
            return
        save()
        received = self.signals.received or "a signal to another process"
        raise Stopped(
            f"{received}: left after {iteration} of {self.components.config.training.iterations} iterations; "
            f"--resume goes on from {self.components.folder}"
        )

    def while_it_fits(self, sample: Callable[[], T]) -> T:
        """Sample; if memory runs out and no other process waits, repeat it with smaller network calls."""
        processes, replicated = self.components.processes, self.components.learner.replicated
        begun = processes.exchanges

        def by_itself() -> bool:
            copied = replicated and processes.columns == 1
            return processes.accelerator.num_processes == 1 or (copied and processes.exchanges == begun)

        return while_it_fits(self.components.config, "rollout", "batch_size", sample, by_itself)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which the run has its folder for itself, and its errors say what would help.

        Raises:
            FlowalignError: another process is gone, or too late; says where each was.
        """
        accelerator, config = self.components.accelerator, self.components.config
        lock = locked(self.components.folder) if accelerator.is_main_process else nullcontext()
        try:
            with lock, self.signals, no_silent_exit(), self._among_others():
                self._folder = _identity(self.components.folder) if accelerator.is_main_process else None
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
            self.components.engine.close()

    @contextmanager
    def _among_others(self) -> Iterator[None]:
        """Context with signs of life between the processes; an error names those that are gone."""
        accelerator = self.components.accelerator
        if accelerator.num_processes == 1:
            yield
            return
        store = torch.distributed.distributed_c10d._get_default_store()
        world = accelerator.process_index, accelerator.num_processes
        self.heartbeat = Heartbeat(store, *world, self.components.config.training.patience)
        together = False
        try:
            yield
            together = True
        except Stopped:
            together = True
            raise
        except RuntimeError as error:
            if not LOST.search(str(error)):
                raise
            reason = str(error).strip().splitlines()[-1]
            raise FlowalignError(
                f"process {world[0]} lost another one ({reason}). {self.heartbeat.others()}. --resume goes on from the "
                "run's last checkpoint; training.timeout is how long processes wait for each other"
            ) from error
        finally:
            self.heartbeat.stop(together)


def _identity(folder: Path) -> tuple[int, int] | None:
    """Device and inode of a folder, which stay the same when it is moved; None if it is not there."""
    try:
        status = folder.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
