"""Noticing that another process died or hangs: each process gives signs of life, and says what it is doing.

Without them a process that waits for a lost one would wait until the communication library gives up, half an hour by
default, and would not learn which process it was. Signs of life go through the store of the process group, from a
separate thread: a process that waits for others is alive, and one that is stopped, or gone with its machine, is not.

A process that is alive and keeps all others waiting is named in a warning: it may be stuck, or have more to do.
"""

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from flowalign.errors import FlowalignError
from flowalign.runs.launcher import LAUNCHER, PROCESS

logger = logging.getLogger(__name__)

LATE = 4
"""Multiple of the patience after which a warning names a process for which all others wait."""


@contextlib.contextmanager
def ending_with_launcher() -> Iterator[None]:
    """Context in which a process ends with its launcher; else it would wait half an hour for others that never come."""
    met = threading.Event()
    # a fork has another launcher
    launcher = LAUNCHER if os.getpid() == PROCESS else os.getppid()

    def watch() -> None:
        while not met.wait(1.0):
            if os.getppid() != launcher:
                os.write(2, b"flowalign: the launcher is gone, and the processes have not met; start it again\n")
                os._exit(75)

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        threading.Thread(target=watch, name="launcher", daemon=True).start()
    try:
        yield
    finally:
        met.set()


class Heartbeat:
    """This process's signs of life, and its watch on the others'. All processes make one together.

    The first process watches all others, and they watch it. A process that misses another one ends itself with a line
    that names the other; checkpoints are whole at any time, so the run can be resumed.

    Args:
        store: store of the process group.
        patience: seconds without a sign of life after which a process is lost.
    """

    def __init__(self, store: Store, rank: int, processes: int, patience: float) -> None:
        self.store: Store = PrefixStore("heartbeat", store.clone())
        self.store.set_timeout(timedelta(seconds=patience))
        self.rank, self.processes, self.patience = rank, processes, patience
        self.phase = "starting"
        """Iteration and phase of this process, for the message when it is missed."""
        self._waits_since: float | None = None
        """Time since which the main thread has waited for other processes at every beat."""
        self._named = False
        self._beats = 0
        self._over = threading.Event()
        self._seen: dict[int, tuple[int, float]] = {}
        self._beat()
        torch.distributed.barrier()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self, together: bool) -> None:
        """End the watch on this process.

        Args:
            together: all processes do so now. The store ends with the first one, which waits until nobody needs it.
        """
        self._over.set()
        self._thread.join()
        self.phase = "done"
        deadline = time.monotonic() + self.patience
        # the store may be gone already
        with contextlib.suppress(torch.distributed.DistError):
            self._beat()
            while together and self.rank == 0 and time.monotonic() < deadline:
                if all(self._read(rank)["done"] for rank in range(self.processes)):
                    return
                time.sleep(0.01)

    def others(self) -> str:
        """Describe what each process did at its last sign of life."""
        try:
            reports = [self._read(rank) for rank in range(self.processes)]
        except torch.distributed.DistError:
            return "the process that the others met by is gone"
        return "; ".join(f"process {rank} ({report['host']}): {report['place']}" for rank, report in enumerate(reports))

    def _beat(self) -> None:
        self._beats += 1
        doing, waits = self._doing()
        now = time.monotonic()
        self._waits_since = (self._waits_since or now) if waits else None
        report = {
            "beats": self._beats,
            "host": f"{socket.gethostname()}, pid {os.getpid()}",
            "place": f"{self.phase}, {doing}",
            "waits": now - self._waits_since if self._waits_since is not None else 0.0,
            "done": self.phase == "done",
        }
        self.store.set(str(self.rank), json.dumps(report))

    def _doing(self) -> tuple[str, bool]:
        """The line that the main thread is at, and True if it waits for other processes there."""
        main = threading.main_thread().ident
        assert main is not None
        stack = traceback.extract_stack(sys._current_frames()[main])
        waits = any(frame.filename.endswith("torch/distributed/distributed_c10d.py") for frame in stack)
        return f"{Path(stack[-1].filename).name}:{stack[-1].lineno} {stack[-1].name}", waits

    def _read(self, rank: int) -> dict[str, Any]:
        return json.loads(self.store.get(str(rank)))

    def _watch(self) -> None:
        watched = [0] if self.rank else range(1, self.processes)
        while not self._over.wait(self.patience / 15):
            try:
                self._beat()
                if self.rank and self.store.check(["verdict"]):
                    self._end(self.store.get("verdict").decode())
                for rank in watched:
                    self._look_at(rank)
                if self.rank == 0:
                    self._name_the_late()
            except torch.distributed.DistError:
                self._end("the process that the others met by is gone")

    def _look_at(self, rank: int) -> None:
        report, now = self._read(rank), time.monotonic()
        beats, since = self._seen.get(rank, (0, now))
        if report["beats"] != beats or report["done"]:
            self._seen[rank] = report["beats"], now
        elif now - since > self.patience:
            verdict = (
                f"process {rank} ({report['host']}) has given no sign of life for {self.patience:g} s; it was at: "
                f"{report['place']}"
            )
            self.store.set("verdict", verdict)
            self._end(verdict)

    def _name_the_late(self) -> None:
        """Warn if all others wait long for one process, once each time."""
        reports = [self._read(rank) for rank in range(self.processes)]
        busy = [rank for rank, report in enumerate(reports) if report["waits"] == 0]
        waited = min((report["waits"] for report in reports if report["waits"]), default=0.0)
        if len(busy) != 1 or waited < LATE * self.patience:
            self._named = False
        elif not self._named:
            self._named = True
            late = reports[busy[0]]
            logger.warning(
                "all others have waited %.0f s for process %d (%s), which is alive; it is at: %s",
                *(waited, busy[0], late["host"], late["place"]),
            )

    def _end(self, verdict: str) -> None:
        print(f"\nflowalign: {verdict}. The run ends; --resume goes on from its last checkpoint", file=sys.stderr)
        sys.stderr.flush()
        # the main thread may wait for the lost process inside the communication library, where no exception reaches it
        os._exit(FlowalignError.exit_code)
