"""How much of the present phase is done, told to whoever shows it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Show = Callable[[int, int], None]
_show: ContextVar[Show | None] = ContextVar("show", default=None)


@contextmanager
def shown(show: Show) -> Iterator[None]:
    """Context in which this thread's `report`s are passed to a function of (done, total)."""
    token = _show.set(show)
    try:
        yield
    finally:
        _show.reset(token)


def report(done: int, total: int) -> None:
    """Tell that so many of all samples, or updates, of the phase are done."""
    show = _show.get()
    if show is not None:
        show(done, total)
