"""Rewards of one rollout while the next is sampled."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
S = TypeVar("S")


def overlapped(rollouts: Iterable[T], score: Callable[[T], S]) -> Iterator[tuple[T, S]]:
    """Each rollout with its scores, in order; rollout n is scored while rollout n + 1 is sampled.

    The numbers are those of sampling and scoring in turn: the rollouts of an iteration are all sampled from the same
    weights, one after the other, in the calling thread, and scored one after the other in another. Of k rollouts
    whose scoring takes as long as their sampling, a share 1 - 1/k of the scoring is hidden. Worth it where scoring
    leaves this process free: a served reward, or one on another device. `score` must draw no global random numbers.

    Args:
        rollouts: an iterator that samples when asked for the next one; each holds whole groups.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="reward") as thread:
        waiting: tuple[T, Future[S]] | None = None
        for rollout in rollouts:
            following = thread.submit(score, rollout)
            if waiting is not None:
                yield waiting[0], waiting[1].result()
            waiting = rollout, following
        if waiting is not None:
            yield waiting[0], waiting[1].result()
