"""The reward as a run asks it: scores of samples, their number, and what people look at of them."""

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flowalign.core.advantages import zero_spread
from flowalign.data.batches import Batch
from flowalign.rollouts.extremes import Extremes
from flowalign.rollouts.processes import Processes
from rewards import Reward, Scores, WeightedSum, score, seen, usage


class Scored:
    """Scores to come."""

    def __init__(self, future: "Future[Scores]") -> None:
        self.done, self._future = future.done, future
        self.waited = 0.0
        """Seconds that they were waited for."""

    def result(self) -> Scores:
        """The scores, once they are there; raises what scoring raised."""
        begin = time.perf_counter()
        try:
            return self._future.result()
        finally:
            self.waited += time.perf_counter() - begin


class Scorer:
    """Scores one process's samples by a reward.

    Args:
        reward: scores samples.
        processes: this process among those that share its samples, which ask a judge once.
    """

    def __init__(self, reward: Reward, processes: Processes) -> None:
        self.reward, self.processes = reward, processes
        self.calls = 0
        """Samples that this process had scored."""
        self.extremes: Extremes | None = None
        """The best and the worst samples of an iteration that people look at, else None."""
        # judges were asked before by somebody else in this process
        usage.take()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within it samples are scored to be looked at: nothing is exchanged or counted."""
        calls = self.calls
        with self.processes.alone():
            yield
        self.calls = calls

    def look(self, closely: bool) -> None:
        """Keep the best and the worst samples from now on, for people; or no more."""
        self.extremes = Extremes() if closely else None

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
        self.calls += len(samples)
        prompts = [batch.prompts[i] for i in rows]
        scores = self.processes.once(lambda: score(self.reward, samples, prompts, metadata))
        if self.extremes is not None and steps is None and not self.processes.apart:
            self.extremes.offer([seen(sample) for sample in samples], prompts, metadata, scores)
        return scores

    def separate(self, scores: Scores) -> tuple[Tensor, Tensor]:
        """The rewards that a weighted sum adds up, [L, B] of all processes, and their weights [L]."""
        if isinstance(self.reward, WeightedSum):
            rewards = torch.stack([scores.parts[r.name] for r in self.reward.rewards])
            weights = torch.tensor(self.reward.weights, device=self.processes.device)
        else:
            rewards, weights = scores.value[None], torch.ones(1, device=self.processes.device)
        return self.processes.gather(rewards.T.to(self.processes.device)).T, weights

    def judged(self) -> dict[str, float]:
        """What judges were asked since the last time, and what it took, of all processes, which call this together."""
        if not usage.judges:
            return {}
        counts = usage.take()
        totals = self.processes.gather(torch.tensor([[*counts.values()]], device=self.processes.device)).sum(0).tolist()
        return {name: count for name, count in zip(counts, totals, strict=True) if count}


def score_metrics(scores: Scores, group: Tensor, processes: Processes) -> dict[str, float]:
    """What the metrics say of the scores of all processes.

    Args:
        group: [B] numbers of the groups of all processes.
    """
    value = processes.gather(scores.value.to(processes.device))
    metrics = {
        "reward/mean": value.mean().item(),
        "reward/std": value.std(correction=0).item(),
        "reward/zero_spread": zero_spread(value, group).item(),
    }
    for name, part in scores.parts.items():
        mean = processes.gather(part.to(processes.device)).nanmean().item()
        # NaN marks samples that a part does not apply to
        if not math.isnan(mean):
            metrics[f"reward/{name}"] = mean
    return metrics
