"""Seconds, forwards and reward calls of a run, which its budget limits."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flowalign.config import BaseConfig
from flowalign.policies.base import Policy
from flowalign.rollouts.scoring import Scorer


class Spent:
    """Counts the seconds, forwards and reward calls of a run.

    Args:
        policy: counts the forwards of this process.
        scorer: counts its reward calls.
    """

    def __init__(self, config: BaseConfig, policy: Policy, scorer: Scorer) -> None:
        self.training, self.policy, self.scorer, self.processes = config.training, policy, scorer, scorer.processes
        self.seconds = 0.0
        """Seconds that iterations took so far."""

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Context whose seconds are added."""
        begin = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - begin

    def counts(self) -> dict[str, int]:
        """`forwards` and `reward_calls` of all processes so far; the processes call this together."""
        local = torch.tensor([[self.policy.forwards, self.scorer.calls]], device=self.processes.device)
        return dict(zip(("forwards", "reward_calls"), self.processes.gather(local).sum(0).tolist(), strict=True))

    def progress(self, iteration: int) -> float:
        """Progress of training in [0, 1]: the share of the iterations or of the budget, whichever is larger.

        It is the same on every process, although each counts its own work.
        """
        budget = self.training.budget
        shares = [iteration / self.training.iterations]
        if budget.seconds is not None:
            seconds = self.processes.gather(torch.tensor([self.seconds], device=self.processes.device))
            shares.append(seconds.max().item() / budget.seconds)
        limits = {"forwards": budget.forwards, "reward_calls": budget.reward_calls}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        counts = self.counts() if given else {}
        return max(shares + [counts[name] / limit for name, limit in given.items()])

    def load_counts(self, counts: dict[str, int]) -> None:
        """Continue from the counts of all processes; each process takes its share of them."""
        row, rows = self.processes.row, self.processes.rows
        self.scorer.calls, self.policy.forwards = (
            counts[name] // rows + (row < counts[name] % rows) for name in ("reward_calls", "forwards")
        )
