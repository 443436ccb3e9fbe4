"""Runs of a few seconds in other processes of this machine's CPU, forked from a server that has imported everything.

To import torch and diffusers takes ten seconds; the server does it once for all files of a test process.
"""

import faulthandler
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate.state import AcceleratorState, PartialState
from torch.multiprocessing.spawn import ProcessException

from flowalign.config import load
from flowalign.training import Trainer

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__, "tests.flowalign.training.warm"])
# less than pytest gives a test, which would not say where the processes are
SECONDS = 500.0


def go_on(folder: Path) -> None:
    """Train, or go on, in this process."""
    torch.set_num_threads(1)
    Trainer(load(folder / "config.yaml"), resume=True, progress=False).train()


def run_script(script: Path, *words: str) -> None:
    """As `python script words`."""
    sys.argv = [str(script), *words]
    runpy.run_path(str(script), run_name="__main__")


class Launch:
    """Processes that work on one folder after the other, of which one with a checkpoint is gone on with.

    Each folder has a `config.yaml`, and in `launch.yaml` environment variables as a launcher would set them.
    """

    def __init__(self, processes: int, *folders: Path) -> None:
        self._told = folders[0] / "told.txt"
        self._told.write_text("")
        begin = torch.multiprocessing.start_processes
        arguments = (processes, free_port(), folders, self._told)
        self._running = begin(_work, arguments, nprocs=processes, join=False, start_method="forkserver")

    @property
    def pids(self) -> list[int]:
        """Of the processes, by rank."""
        return self._running.pids()

    def told(self) -> str:
        """What they have printed so far."""
        return self._told.read_text()

    def finish(self) -> str:
        """Wait for them; returns what they printed, and raises what one of them raised, with what they printed.

        Where they take too long, they are stopped, and what they printed ends on where each of them was.
        """
        deadline = time.monotonic() + SECONDS
        try:
            while not self._running.join(timeout=1):
                if time.monotonic() > deadline:
                    for pid in self.pids:
                        os.kill(pid, signal.SIGUSR1)
                    time.sleep(1)
                    for pid in self.pids:
                        os.kill(pid, signal.SIGKILL)
                    raise TimeoutError(f"{len(self.pids)} processes take more than {SECONDS:g} seconds")
        except (ProcessException, TimeoutError) as error:
            error.add_note(self.told())
            raise
        return self.told()


def together(processes: int, *folders: Path) -> str:
    """Train, or go on, one folder after the other on several processes; returns what they printed."""
    return Launch(processes, *folders).finish()


def run_together(processes: int, work: Callable[..., None], *words: Any) -> None:
    """Call `work(rank, *words)` in several processes of one group; raises what one of them raised."""
    begin = torch.multiprocessing.start_processes
    begin(_joined, (processes, free_port(), work, words), nprocs=processes, start_method="forkserver")


def _joined(rank: int, processes: int, port: int, work: Callable[..., None], words: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    _join(rank, processes, port)
    work(rank, *words)
    torch.distributed.destroy_process_group()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _join(rank: int, processes: int, port: int) -> None:
    """Be a process of a group, as a launcher would say it."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
    }


def _work(rank: int, processes: int, port: int, folders: tuple[Path, ...], told: Path) -> None:
    with open(told, "a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    # where a process is that a library aborts, or that waits for ever
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2)
    _join(rank, processes, port)
    for folder in folders:
        environment = yaml.safe_load((folder / "launch.yaml").read_text())
        os.environ |= environment
        go_on(folder)
        for name in environment:
            del os.environ[name]
        AcceleratorState._reset_state()
        PartialState._reset_state()
    torch.distributed.destroy_process_group()
