"""Scoring one part of a batch while the policy samples the next."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from types import TracebackType
from typing import ParamSpec, Self

import torch

from flowalign.rollouts.scoring import Scored
from rewards import Scores

P = ParamSpec("P")


class Scoring:
    """An executor, as in concurrent.futures, that scores one part after the other, at once or in a separate thread.

    With a thread and k parts whose scoring takes as long as their sampling, a share 1 - 1/k of the scoring is hidden.
    The numbers do not change: all parts are sampled from the same weights, one after the other, in the calling thread.
    A thread pays off if scoring leaves this process free: a served reward, or one on another device. Scoring must not
    draw global random numbers. If a part fails, no further one is scored: a lost server is waited for only once.

    Args:
        threaded: score in a thread.
    """

    def __init__(self, threaded: bool) -> None:
        self._threaded = threaded
        self.seconds: dict[str, float] = {}
        """Seconds by metric, known at the end: rollout, waiting for scores, and, with a thread, hidden scoring."""

    def __enter__(self) -> Self:
        self._scored = 0.0
        self._submitted: list[Scored] = []
        self._failed = threading.Event()
        self._begin = time.perf_counter()
        if self._threaded:
            device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

            def start() -> None:
                # a new thread begins with the first GPU, even if this process has another one
                if device is not None:
                    torch.accelerator.set_device_index(device)

            self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward", initializer=start)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self._failed.set()
        waited = sum(scored.waited for scored in self._submitted)
        if self._threaded:
            self._thread.shutdown()
            self.seconds["seconds/reward_hidden"] = self._scored - waited
        else:
            waited += self._scored
        self.seconds["seconds/reward"] = waited
        self.seconds["seconds/rollout"] = time.perf_counter() - self._begin - waited

    def submit(self, score: Callable[P, Scores], *args: P.args, **kwargs: P.kwargs) -> Scored:
        """Start `score(*args, **kwargs)`; return the scores to come."""

        def timed() -> Scores:
            if self._failed.is_set():
                raise CancelledError
            begin = time.perf_counter()
            try:
                return score(*args, **kwargs)
            except BaseException:
                self._failed.set()
                raise
            finally:
                self._scored += time.perf_counter() - begin

        if self._threaded:
            scored = Scored(self._thread.submit(timed))
        else:
            future: Future[Scores] = Future()
            future.set_result(timed())
            scored = Scored(future)
        self._submitted.append(scored)
        return scored
