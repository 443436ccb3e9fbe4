"""The groups of one iteration: the batches to sample, and what was sampled of them."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from flowalign.config import BaseConfig
from flowalign.data.batches import Batch
from flowalign.rollouts.sampler import Sampled, Sampler
from flowalign.rollouts.scoring import Scored, Scorer
from rewards import Scores


class Workers(Protocol):
    """Other processes that sample with the algorithm of the run, from given weights."""

    def begin(self, parts: Sequence[Batch]) -> list[Any]:
        """Begin with these parts; a task for each."""


class Draw:
    """The groups of a batch, an iterator over their parts: as many as the run's settings say (`parts_of`).

    Args:
        sampler: what samples them.
        scorer: what scores them.
        batch: whole groups.
        workers: other processes that sample them; None: this one does.
    """

    def __init__(self, sampler: Sampler, scorer: Scorer, batch: Batch, workers: Workers | None = None) -> None:
        self.sampler, self.scorer, self.batch, self.workers = sampler, scorer, batch, workers
        self.parts = parts_of(sampler.config)
        self._begun: list[tuple[Batch, Any]] = []
        self._parts: list[tuple[Any, Batch, Scored | None]] = []

    def begin(self) -> None:
        """Let the workers begin with the parts."""
        self._begun = self._shared(self.batch)

    def __iter__(self) -> Iterator[tuple[Batch, Any]]:
        """Parts, each with the task of a worker that samples it; from the start, whatever was put before: an attempt
        that ran out of memory is made again."""
        self._parts = []
        yield from self._split(self.batch)

    def _shared(self, batch: Batch) -> list[tuple[Batch, Any]]:
        """The parts of a batch, each with the task of a worker that has begun with it."""
        parts = batch.split(min(self.parts, len(set(batch.group))))
        tasks = [None] * len(parts) if self.workers is None else self.workers.begin(parts)
        return list(zip(parts, tasks, strict=True))

    def _split(self, batch: Batch) -> Iterator[tuple[Batch, Any]]:
        begun, self._begun = self._begun or self._shared(batch), []
        for part in begun:
            yield part
            for _, _, scored in self._parts:
                if scored is not None and scored.done():
                    # nothing more is sampled where scoring failed
                    scored.result()

    def put(self, rollout: Any, batch: Batch, scored: Scored | None) -> None:
        """What was sampled of the last batch.

        Args:
            batch: the samples of the rollout; an algorithm that branches makes several groups of a prompt.
            scored: their scores to come; None where there are none.
        """
        self._parts.append((rollout, batch, scored))

    def whole(self) -> Sampled[Any, Any]:
        """All that was sampled since the last call, with its scores."""
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
    """Parts that an iteration's groups are sampled in: `rollout.overlap`, and at least one for each worker."""
    workers = config.rollout.workers
    return max(config.rollout.overlap, workers.count if workers else 1)
