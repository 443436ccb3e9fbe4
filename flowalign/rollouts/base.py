"""One process's part of training: its policy, its reward, and the other processes."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from flowalign.config import BaseConfig
from flowalign.core.advantages import zero_spread
from flowalign.data.batches import Batch
from flowalign.policies.base import Policy
from flowalign.rollouts.extremes import Extremes
from flowalign.rollouts.processes import Processes
from flowalign.rollouts.sampler import Sampler
from rewards import Reward, Scores, WeightedSum, score, seen, usage


class Actor:
    """Scores one process's samples and exchanges numbers with the others; subclasses sample."""

    config: BaseConfig
    policy: Policy
    sampler: Sampler

    def __init__(self, config: BaseConfig, policy: Policy, reward: Reward, accelerator: Accelerator) -> None:
        self.config, self.policy, self.reward, self.accelerator = config, policy, reward, accelerator
        self.device = accelerator.device
        self.processes = Processes(accelerator, getattr(config.model, "context_parallel", None))
        self.reward_calls = 0
        self.metrics: dict[str, float] = {}
        """what acting measured in this iteration"""
        self.extremes: Extremes | None = None
        """what is told of every finished sample that is scored, in iterations that people look at"""
        self.exchanges = 0
        """times that processes have waited here for each other"""
        # what judges were asked before was asked by somebody else in this process
        usage.take()
        self._alone = False

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Within it this process acts for itself, to look at something: nothing is exchanged, counted or learned."""
        kept = self.policy.forwards, self.reward_calls, dict(self.metrics)
        self._alone = True
        try:
            yield
        finally:
            self._alone = False
            self.policy.forwards, self.reward_calls, self.metrics = kept

    def metadata(self, batch: Batch, rows: Sequence[int]) -> list[dict[str, Any]]:
        """What rewards are told of samples of these rows: the prompt's metadata, the group, the start noise's seed."""
        return [batch.metadata[i] | {"group": batch.group[i], "seed": batch.seeds[i]} for i in rows]

    def score(
        self,
        samples: Sequence[Any],
        batch: Batch,
        rows: Sequence[int] | None = None,
        steps: Sequence[int] | None = None,
    ) -> Scores:
        """Checked scores of one sample a row of the batch, or of samples of these rows.

        Rewards that look at groups see the batch's; pictures finished from the states of different `steps` are
        not in one group.
        """
        rows = range(len(batch)) if rows is None else rows
        metadata = self.metadata(batch, rows)
        if steps is not None:
            for record, step in zip(metadata, steps, strict=True):
                record["group"] = f"{record['group']}/{step}"
        self.reward_calls += len(samples)
        prompts = [batch.prompts[i] for i in rows]

        def asked() -> Scores:
            return score(self.reward, samples, prompts, metadata)

        scores = asked() if self._alone else self.processes.once(asked)
        if self.extremes is not None and steps is None and not self._alone:
            self.extremes.offer([seen(sample) for sample in samples], prompts, metadata, scores)
        return scores

    def score_metrics(self, scores: Scores, group: Tensor) -> dict[str, float]:
        """What the metrics say of the scores of all processes.

        Args:
            group: of all processes.
        """
        value = self.gather(scores.value.to(self.device))
        metrics = {
            "reward/mean": value.mean().item(),
            "reward/std": value.std(correction=0).item(),
            "reward/zero_spread": zero_spread(value, group).item(),
        }
        for name, part in scores.parts.items():
            mean = self.gather(part.to(self.device)).nanmean().item()
            # NaN marks samples that a part does not apply to
            if not math.isnan(mean):
                metrics[f"reward/{name}"] = mean
        return metrics

    def add_seconds(self, part: str, seconds: float) -> None:
        """Add to the seconds that a part of this iteration took."""
        self.metrics[f"seconds/{part}"] = self.metrics.get(f"seconds/{part}", 0.0) + seconds

    def separate(self, scores: Scores) -> tuple[Tensor, Tensor]:
        """The rewards that a weighted sum adds up, [L, B] of all processes, and their weights [L]."""
        if isinstance(self.reward, WeightedSum):
            rewards = torch.stack([scores.parts[r.name] for r in self.reward.rewards])
            weights = torch.tensor(self.reward.weights, device=self.device)
        else:
            rewards, weights = scores.value[None], torch.ones(1, device=self.device)
        return self.gather(rewards.T.to(self.device)).T, weights

    def advantage_weight(self, scores: Scores) -> Tensor | None:
        """[B] of all processes: by which the scores weigh the advantages; None where they do not."""
        return None if scores.weight is None else self.gather(scores.weight.to(self.device))

    def undivided(self) -> contextlib.AbstractContextManager[None]:
        """Within it a process can use the policy's networks without those that share its samples."""
        return contextlib.nullcontext()

    def gather(self, values: Tensor) -> Tensor:
        """Rows of all processes, in the order of one process."""
        if self._alone:
            return values
        self.exchanges += 1
        return self.processes.gather(values)

    def own(self, values: Tensor, rows: int) -> Tensor:
        """This process's rows of gathered values."""
        start = self.processes.row * rows
        return values[start : start + rows]

    def maximum(self, count: int) -> int:
        """The largest of a number over the processes, of which a signal may have come to any."""
        if self._alone:
            return int(count)
        self.exchanges += 1
        return int(self.accelerator.gather(torch.tensor([count], device=self.device)).max())

    def counts(self) -> dict[str, int]:
        """`forwards` and `reward_calls` so far, of all processes, which call this together."""
        own = torch.tensor([[self.policy.forwards, self.reward_calls]], device=self.device)
        return dict(zip(("forwards", "reward_calls"), self.gather(own).sum(0).tolist(), strict=True))

    def judged(self) -> dict[str, float]:
        """What judges were asked since the last time, and what it took, of all processes, which call this together."""
        own = usage.take()
        if not own:
            return {}
        totals = self.gather(torch.tensor([[*own.values()]], device=self.device)).sum(0).tolist()
        return {name: count for name, count in zip(own, totals, strict=True) if count}

    # What adapts, for the checkpoint

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Tensors by file, and JSON."""
        return {}, dict(self.counts())

    def load_state(self, tensors: dict[str, dict[str, Tensor]], rest: dict[str, Any]) -> None:
        """The inverse of `state`; each process goes on from its share of the counts."""
        index, processes = self.processes.row, self.processes.rows
        counts = (rest[name] // processes + (index < rest[name] % processes) for name in ("reward_calls", "forwards"))
        self.reward_calls, self.policy.forwards = counts
