"""Scoring of a run's samples: scores by a reward, their number, and extreme samples for people."""

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor

from flowalign.core.groups import zero_spread
from flowalign.data.batches import Batch
from flowalign.rollouts.extremes import Extremes
from flowalign.rollouts.processes import Processes
from rewards import UNPARSED, Reward, Scores, UnreadReplies, WeightedSum, groups, score, seen, usage
from rewards.base import learning


@dataclass
class Scored:
    """Scores that may still be computed."""

    future: "Future[Scores]"
    waited: float = 0.0
    """Seconds spent waiting for them."""

    def result(self) -> Scores:
        """Wait for the scores; raises the error of scoring."""
        begin = time.perf_counter()
        try:
            return self.future.result()
        finally:
            self.waited += time.perf_counter() - begin


class Scorer:
    """Scores one process's samples by a reward.

    Args:
        reward: the reward.
        processes: this process, among those that share its samples, which query a judge only once.
    """

    def __init__(self, reward: Reward, processes: Processes) -> None:
        self.reward, self.processes = reward, processes
        self.calls = 0
        """Number of samples that this process has had scored."""
        self.learning = learning(reward)
        """Rewards that go on learning during the run."""
        self._to_learn: list[tuple[Sequence[Any], Batch]] = []
        """This iteration's samples, for rewards that learn."""
        self.extremes: Extremes | None = None
        """The best and the worst samples of an iteration that people look at; None in other iterations."""
        self.in_parts = False
        """Whether samples that are scored together come in several parts."""
        self.unsure = False
        """Whether all parts together would have other scores than each: too few of a judge's replies could be read."""
        # drop the counts of earlier work in this process
        usage.take()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Context in which samples are scored only for people: nothing is exchanged or counted."""
        calls = self.calls
        with self.processes.alone():
            yield
        self.calls = calls

    def begin(self, shown: bool, parts: int = 1) -> None:
        """Begin an iteration, or another attempt at it; its best and worst samples are kept if people look at them.

        Args:
            parts: number of parts in which its samples are scored, until `end`.
        """
        self._to_learn, self.in_parts, self.unsure = [], parts > 1, False
        self.extremes = Extremes() if shown else None

    def end(self) -> None:
        """End of the parts of an iteration."""
        self.in_parts = False

    def keep(self, samples: Sequence[Any], batch: Batch) -> None:
        """Keep samples of the iteration for the rewards that learn, if there are any."""
        if self.learning:
            self._to_learn.append((samples, batch))

    def metadata(self, batch: Batch, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Metadata for rewards of samples of these rows: the prompt's, the group, and the start noise's seed."""
        return [batch.metadata[i] | {"group": batch.group[i], "seed": batch.seeds[i]} for i in rows]

    def score(
        self,
        samples: Sequence[Any],
        batch: Batch,
        rows: Sequence[int] | None = None,
        steps: Sequence[int] | None = None,
    ) -> Scores:
        """Score one sample for each row of the batch, or samples of these rows, and check the scores.

        Rewards that compare a group see the batch's groups; pictures that were finished from states at different
        `steps` are in different groups.
        """
        rows = range(len(batch)) if rows is None else rows
        metadata = self.metadata(batch, rows)
        if steps is not None:
            for record, step in zip(metadata, steps, strict=True):
                record["group"] = f"{record['group']}/{step}"
        self.calls += len(samples)
        prompts = [batch.prompts[i] for i in rows]
        try:
            scores = self.processes.once(lambda: score(self.reward, samples, prompts, metadata))
        except UnreadReplies:
            if not self.in_parts:
                raise
            self.unsure = True
            return Scores(torch.zeros(len(samples)))
        self.unsure |= self.in_parts and silent(scores, prompts, metadata)
        if self.extremes is not None and steps is None and not self.processes.apart:
            self.extremes.offer([seen(sample) for sample in samples], prompts, metadata, scores)
        return scores

    def at_once(self, samples: Sequence[Any], batch: Batch) -> Scores:
        """Score all samples of an iteration or a round together, of whose parts a judge could not read enough."""
        in_parts, self.in_parts, self.unsure = self.in_parts, False, False
        self.calls -= len(samples)
        if self.extremes is not None:
            self.extremes = Extremes()
        scores = self.score(samples, batch)
        self.in_parts = in_parts
        return scores

    def learn(self) -> dict[str, float]:
        """Let the rewards that learn do so, from the samples of the iteration; all processes call this together."""
        if not self.learning:
            return {}
        rows = [
            (sample, prompt, record)
            for samples, batch in self._to_learn
            for sample, prompt, record in zip(
                samples, batch.prompts, self.metadata(batch, range(len(batch))), strict=True
            )
        ]
        processes = self.processes
        metrics: dict[str, float] = {}
        rows = processes.gather_objects(rows) if processes.accelerator.num_processes > 1 else rows
        samples, prompts, metadata = (list(column) for column in zip(*rows, strict=True))
        for reward in self.learning:
            told: list[Any] = [None, None]
            if processes.accelerator.is_main_process:
                told = [reward.learn(samples, prompts, metadata), reward.state()]
            if processes.accelerator.num_processes > 1:
                broadcast_object_list(told)
            if not processes.accelerator.is_main_process:
                reward.load_state(*told[1])
            metrics |= {f"reward/{reward.name}/{name}": value for name, value in told[0].items()}
        return metrics

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Tensors by file, and JSON, of what rewards have learned."""
        states = [reward.state() for reward in self.learning]
        # a file without a tensor cannot be written
        tensors = {f"reward_{i}": each for i, (each, _) in enumerate(states) if each}
        return tensors, {"rewards": [state for _, state in states]}

    def load_state(self, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        for i, (reward, learned) in enumerate(zip(self.learning, state.get("rewards", []), strict=True)):
            reward.load_state(tensors.get(f"reward_{i}", {}), learned)

    def separate(self, scores: Scores) -> tuple[Tensor, Tensor]:
        """The terms of a weighted sum of rewards, [L, B] over all processes, and their weights [L]."""
        if isinstance(self.reward, WeightedSum):
            rewards = torch.stack([scores.parts[r.name] for r in self.reward.rewards])
            weights = torch.tensor(self.reward.weights, device=self.processes.device)
        else:
            rewards, weights = scores.value[None], torch.ones(1, device=self.processes.device)
        return self.processes.gather(rewards.T.to(self.processes.device)).T, weights

    def judged(self) -> dict[str, float]:
        """Metrics of judges' calls since the last time, over all processes, which call this together."""
        if not usage.judges:
            return {}
        counts = usage.take()
        totals = self.processes.gather(torch.tensor([[*counts.values()]], device=self.processes.device)).sum(0).tolist()
        return {name: count for name, count in zip(counts, totals, strict=True) if count}


def silent(scores: Scores, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> bool:
    """Whether a judge says nothing that can be read about all samples of a group."""
    unparsed = [values for name, values in scores.parts.items() if name.split("/")[-1] == UNPARSED]
    return any(bool((values[rows] == 1).all()) for values in unparsed for rows in groups(prompts, metadata))


def score_metrics(scores: Scores, group: Tensor, processes: Processes) -> dict[str, float]:
    """Metrics of the scores of all processes.

    Args:
        group: [B] numbers of the groups of all processes.
    """
    value = scores.value if scores.missing is None else scores.value.masked_fill(scores.missing, torch.nan)
    value = processes.gather(value.to(processes.device))
    some = value[~value.isnan()]
    metrics = {
        "reward/mean": some.mean().item() if len(some) else 0.0,
        "reward/std": some.std(correction=0).item() if len(some) else 0.0,
        "reward/zero_spread": zero_spread(value, group).item(),
    }
    for name, values in scores.parts.items():
        mean = processes.gather(values.to(processes.device)).nanmean().item()
        # NaN marks samples that a part does not apply to
        if not math.isnan(mean):
            metrics[f"reward/{name}"] = mean
    return metrics
