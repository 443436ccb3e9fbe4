"""A command in several processes of this machine's CPU, without a launcher of the user's."""

import contextlib
import io
import logging
import os
import runpy
import signal
import sys
import time
from collections.abc import Sequence

import torch
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.multiprocessing.spawn import ProcessExitedException, start_processes


def free_processors(most: int) -> int:
    """The number of processes for a command that was not launched: up to `most`, one each for this CPU's processors.

    1 where there is a GPU, under a launcher such as `accelerate launch`, and on Windows, where groups of processes need
    settings.
    """
    if "WORLD_SIZE" in os.environ or torch.accelerator.is_available() or sys.platform == "win32":
        return 1
    return min(most, os.cpu_count() or 1)


def launch(processes: int, words: Sequence[str]) -> int:
    """Run `flowalign words` in processes of one group, each with one thread; returns its exit code.

    The first one prints. What another one prints is shown only where that one alone fails.
    """
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    arguments = (processes, get_free_port(), list(words))
    running = start_processes(_run, arguments, nprocs=processes, join=False, start_method="spawn")
    while True:
        try:
            if running.join():
                return 0
        except ProcessExitedException as error:
            if error.exit_code > 0:
                return error.exit_code
            # it could say nothing itself
            name = signal.Signals(-error.exit_code).name
            memory = "; SIGKILL often means that memory ran out" if name == "SIGKILL" else ""
            text = f"process {error.error_index} of {processes} was ended by {name}{memory}"
            print(f"flowalign: {text}; WORLD_SIZE=1 in the environment takes one process", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            # a run ends with a checkpoint, and takes a second signal at once for the same
            for pid in running.pids():
                os.kill(pid, signal.SIGINT)


def _run(rank: int, processes: int, port: int, words: list[str]) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }
    sys.argv = ["flowalign", *words]
    if rank == 0:
        runpy.run_module("flowalign", run_name="__main__")
        return
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            runpy.run_module("flowalign", run_name="__main__")
    except SystemExit as left:
        if left.code:
            # mostly the first one fails by the same, and that ends this one
            time.sleep(10)
            sys.stderr.write(printed.getvalue())
        raise
