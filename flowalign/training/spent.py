"""What a run has used up, of which its budget is a limit."""

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

    def counts(self) -> dict[str, int]:
        """`forwards` and `reward_calls` so far, of all processes, which call this together."""
        own = torch.tensor([[self.policy.forwards, self.scorer.calls]], device=self.processes.device)
        return dict(zip(("forwards", "reward_calls"), self.processes.gather(own).sum(0).tolist(), strict=True))

    def progress(self, iteration: int) -> float:
        """How far training is, in [0, 1]: the share of the iterations or of the budget, whichever is larger.

        The same on every process, though each counts its own work.
        """
        budget = self.training.budget
        shares = [iteration / self.training.iterations]
        if budget.seconds is not None:
            seconds = self.processes.gather(torch.tensor([self.seconds], device=self.processes.device))
            shares.append(seconds.max().item() / budget.seconds)
        limits = {"forwards": budget.forwards, "reward_calls": budget.reward_calls}
        counts = self.counts()
        return max(shares + [counts[name] / limit for name, limit in limits.items() if limit is not None])

    def load_counts(self, counts: dict[str, int]) -> None:
        """Go on from the counts of all processes; each has its share of them."""
        row, rows = self.processes.row, self.processes.rows
        self.scorer.calls, self.policy.forwards = (
            counts[name] // rows + (row < counts[name] % rows) for name in ("reward_calls", "forwards")
        )
