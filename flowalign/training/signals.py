"""Signals that end a run: the first one waits for a checkpoint, a second one does not."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from flowalign.errors import FlowalignError

NAMES = ("SIGTERM", "SIGINT", "SIGUSR1")
ONCE = 1.0
"""Seconds within which signals count as one: a terminal also signals the launcher, which passes the signal on."""


class Stopped(FlowalignError):
    """A run ended with a checkpoint because of a signal; the same command continues it."""

    exit_code = 75
    """EX_TEMPFAIL, at which schedulers put a job back into the queue."""


class Signals:
    """Context in which a first SIGTERM, SIGINT or SIGUSR1 is only noted in `received`; a second one ends the process.

    Args:
        announce: print what will happen.
    """

    def __init__(self, announce: bool) -> None:
        self.announce = announce
        self.received: str | None = None
        self._when = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self.received = None
        # only the main thread may set handlers; Windows has no SIGUSR1
        if threading.current_thread() is threading.main_thread():
            numbers = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
            self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.received is None:
            self.received, self._when = signal.Signals(number).name, time.monotonic()
            if self.announce:
                text = "a checkpoint after this iteration, then the run leaves; a second signal ends it at once"
                # not print: the signal may have interrupted one
                os.write(2, f"\nflowalign: {self.received}: {text}\n".encode())
        elif time.monotonic() - self._when > ONCE:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


@contextmanager
def no_silent_exit() -> Iterator[None]:
    """Context in which `os._exit(0)`, which would look like the end of a run, fails with a message."""
    leave, process = os._exit, os.getpid()

    def exit_with_message(code: int) -> None:
        # a fork also ends by os._exit
        if code == 0 and os.getpid() == process:
            caller = sys._getframe(1)
            location = f"{caller.f_code.co_filename}, line {caller.f_lineno}"
            text = (
                f"{location}, called os._exit(0), and the run has not ended; --resume goes on from its last checkpoint"
            )
            os.write(2, f"\nflowalign: {text}\n".encode())
            code = 1
        leave(code)

    os._exit = exit_with_message  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = leave
