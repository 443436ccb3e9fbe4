"""Noticing that another process died or hangs: each gives signs of life, and says where it is.

Whoever waits for a process that is gone would wait until the communication library gives up, half an hour by default,
and then learn nothing of which it was. Signs of life travel through the store that the processes met by, in a thread
of their own, so a process that waits for the others is alive and one that is stopped, or gone with its machine, is not.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from flowalign.errors import FlowalignError


class Pulse:
    """This process's signs of life, and its eye on the others'. All processes make one together.

    The first process watches all, the others watch it, and whoever misses one ends its own process with a line that
    names it; checkpoints are whole at any time, so the run resumes.

    Args:
        store: what the processes met by.
        patience: seconds without a sign of life.
    """

    def __init__(self, store: Store, rank: int, processes: int, patience: float) -> None:
        self.store: Store = PrefixStore("pulse", store.clone())
        self.store.set_timeout(timedelta(seconds=patience))
        self.rank, self.processes, self.patience = rank, processes, patience
        self.place = "starting"
        self._beats = 0
        self._over = threading.Event()
        self._seen: dict[int, tuple[int, float]] = {}
        self._beat()
        torch.distributed.barrier()
        self._thread = threading.Thread(target=self._watch, name="pulse", daemon=True)
        self._thread.start()

    def at(self, place: str) -> None:
        """Say where this process is, for the message when it is missed."""
        self.place = place

    def stop(self) -> None:
        """This process needs no watching any more."""
        self._over.set()
        self._thread.join()
        self.place = "done"
        # the others' meeting point may have gone before
        with contextlib.suppress(torch.distributed.DistError):
            self._beat()

    def others(self) -> str:
        """Where each process was when it last gave a sign of life."""
        try:
            told = [self._read(rank) for rank in range(self.processes)]
        except torch.distributed.DistError:
            return "the process that the others met by is gone"
        return "; ".join(f"process {rank} ({own['host']}): {own['place']}" for rank, own in enumerate(told))

    def _beat(self) -> None:
        self._beats += 1
        told = {"beats": self._beats, "host": f"{socket.gethostname()}, pid {os.getpid()}", "place": self.place}
        self.store.set(str(self.rank), json.dumps(told))

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
            except torch.distributed.DistError:
                self._end("the process that the others met by is gone")

    def _look_at(self, rank: int) -> None:
        told, now = self._read(rank), time.monotonic()
        beats, since = self._seen.get(rank, (0, now))
        if told["beats"] != beats or told["place"] == "done":
            self._seen[rank] = told["beats"], now
        elif now - since > self.patience:
            verdict = (
                f"process {rank} ({told['host']}) has given no sign of life for {self.patience:g} s; it was at: "
                f"{told['place']}"
            )
            self.store.set("verdict", verdict)
            self._end(verdict)

    def _end(self, verdict: str) -> None:
        print(f"\nflowalign: {verdict}. The run ends; --resume goes on from its last checkpoint", file=sys.stderr)
        sys.stderr.flush()
        # the main thread may wait for the lost process inside the communication library, where no exception reaches it
        os._exit(FlowalignError.exit_code)
