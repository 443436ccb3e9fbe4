"""Rewards of one rollout while the next is sampled."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
S = TypeVar("S")


def in_turn(rollouts: Iterable[T], score: Callable[[T], S]) -> list[tuple[T, S]]:
    """Each rollout with its scores: sampled, then scored."""
    return [(rollout, score(rollout)) for rollout in rollouts]


def overlapped(rollouts: Iterable[T], score: Callable[[T], S]) -> list[tuple[T, S]]:
    """Each rollout with its scores, in order; rollout n is scored while rollout n + 1 is sampled.

    The numbers are the same as by `in_turn`: the rollouts of an iteration are all sampled from the same weights, one
    after the other, in the calling thread, and scored one after the other in another. Of k rollouts whose scoring takes
    as long as their sampling, a share 1 - 1/k of the scoring is hidden. Worth it where scoring leaves this process
    free: a served reward, or one on another device. `score` must draw no global random numbers. Once it fails nothing
    more is sampled or scored: a server that stays away is waited for once.

    Args:
        rollouts: an iterator that samples when asked for the next one; each holds whole groups.
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def start() -> None:
        # a new thread begins on the first GPU, whichever is this process's
        if device is not None:
            torch.cuda.set_device(device)

    over = threading.Event()

    def guarded(rollout: T) -> S:
        if over.is_set():
            raise CancelledError
        try:
            return score(rollout)
        except BaseException:
            over.set()
            raise

    with ThreadPoolExecutor(1, thread_name_prefix="reward", initializer=start) as thread:
        scored: list[tuple[T, Future[S]]] = []
        try:
            for rollout in rollouts:
                scored.append((rollout, thread.submit(guarded, rollout)))
                if over.is_set():
                    break
        except BaseException:
            over.set()
            raise
        return [(rollout, scores.result()) for rollout, scores in scored]
