"""Leaving when asked to: the first signal waits for a checkpoint, a second one does not."""

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
"""Seconds within which signals count as one: a terminal's also reaches the launcher, which passes it on."""


class Stopped(FlowalignError):
    """A run left with a checkpoint because it was asked to; the command is to be given again."""

    exit_code = 75
    """EX_TEMPFAIL, by which schedulers know a job to put back into the queue."""


class Signals:
    """Within it a first SIGTERM, SIGINT or SIGUSR1 is only noted in `received`; a second one ends the process.

    Args:
        announce: say on the screen what will happen.
    """

    def __init__(self, announce: bool) -> None:
        self.announce = announce
        self.received: str | None = None
        self._when = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self.received = None
        # signals are the main thread's; Windows has no SIGUSR1
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
                # a handler may come in the middle of a print
                os.write(2, f"\nflowalign: {self.received}: {text}\n".encode())
        elif time.monotonic() - self._when > ONCE:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


@contextmanager
def no_silent_exit() -> Iterator[None]:
    """Within it `os._exit(0)` of this process, which would pass for the end of a run, says so and is no success."""
    leave, process = os._exit, os.getpid()

    def told(code: int) -> Any:
        # a fork ends by it too
        if code == 0 and os.getpid() == process:
            caller = sys._getframe(1)
            place = f"{caller.f_code.co_filename}, line {caller.f_lineno}"
            text = f"{place}, called os._exit(0), and the run has not ended; --resume goes on from its last checkpoint"
            os.write(2, f"\nflowalign: {text}\n".encode())
            code = 1
        leave(code)

    os._exit = told  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = leave
