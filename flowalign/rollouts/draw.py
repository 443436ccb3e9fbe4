"""The groups of one iteration: the batches to sample, and their samples."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from flowalign.config import BaseConfig
from flowalign.data.batches import Batch
from flowalign.rollouts.sampler import Sampled, Sampler
from flowalign.rollouts.scoring import Scored, Scorer
from rewards import Scores


class Workers(Protocol):
    """Other processes that sample with the algorithm of the run, from given weights."""

    def begin(self, parts: Sequence[Batch]) -> Sequence[Any]:
        """Begin to sample these parts; return a task for each."""


class Draw:
    """The groups of a batch, as an iterator over its parts, whose number the run's settings give (`parts_of`).

    Args:
        sampler: samples the groups.
        scorer: scores the samples.
        batch: whole groups.
        workers: other processes that sample the groups; None: this process does.
    """

    def __init__(self, sampler: Sampler, scorer: Scorer, batch: Batch, workers: Workers | None = None) -> None:
        self.sampler, self.scorer, self.batch, self.workers = sampler, scorer, batch, workers
        self.parts = parts_of(sampler.config)
        self._begun: list[tuple[Batch, Any]] = []
        self._parts: list[tuple[Any, Batch, Scored | None]] = []

    def begin(self) -> None:
        """Let the workers begin to sample the parts."""
        self._begun = self._shared(self.batch)

    def __iter__(self) -> Iterator[tuple[Batch, Any]]:
        """Yield the parts, each with the task of the worker that samples it. Samples of an earlier attempt, which ran
        out of memory, are dropped."""
        self._parts = []
        yield from self._split(self.batch)

    def _shared(self, batch: Batch) -> list[tuple[Batch, Any]]:
        """The parts of a batch, each with the task of the worker that has begun to sample it."""
        parts = batch.split(min(self.parts, len(set(batch.group))))
        tasks: Sequence[Any] = [None] * len(parts) if self.workers is None else self.workers.begin(parts)
        return list(zip(parts, tasks, strict=True))

    def _split(self, batch: Batch) -> Iterator[tuple[Batch, Any]]:
        begun, self._begun = self._begun or self._shared(batch), []
        for part in begun:
            yield part
            for _, _, scored in self._parts:
                if scored is not None and scored.done():
                    # raises if scoring failed, so that no further part is sampled
                    scored.result()

    def put(self, rollout: Any, batch: Batch, scored: Scored | None) -> None:
        """Add the samples of the last part.

        Args:
            batch: the rollout's samples; an algorithm that branches makes several groups of a prompt.
            scored: their scores to come; None if they are not scored.
        """
        self._parts.append((None if rollout is None else self.sampler.stored(rollout), batch, scored))

    def whole(self) -> Sampled[Any, Any]:
        """All samples since the last call, with their scores, as one."""
        parts = [
            self._sampled(rollout, batch, None if scored is None else scored.result())
            for rollout, batch, scored in self._parts
        ]
        self._parts = []
        return self._joined(parts)

    def _sampled(self, rollout: Any, batch: Batch, scores: Scores | None) -> Sampled[Any, Any]:
        return Sampled(rollout=rollout, batch=batch, scores=scores, sampler=self.sampler, scorer=self.scorer)

    def _joined(self, parts: Sequence[Sampled[Any, Any]]) -> Sampled[Any, Any]:
        """Several parts as one."""
        if len(parts) == 1:
            return parts[0]
        rollouts = [part.rollout for part in parts if part.rollout is not None]
        scores = [part.scores for part in parts if part.scores is not None]
        return self._sampled(
            self.sampler.cat(rollouts) if rollouts else None,
            Batch.cat([part.batch for part in parts]),
            Scores.cat(scores) if scores else None,
        )


def parts_of(config: BaseConfig) -> int:
    """Number of parts that an iteration is sampled in: `rollout.overlap`, and at least one for each worker."""
    workers = config.rollout.workers
    return max(config.rollout.overlap, workers.count if workers else 1)
