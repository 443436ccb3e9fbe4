"""The groups of one iteration: the batches to sample, and their samples."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from flowalign.config import BaseConfig
from flowalign.data.batches import Batch
from flowalign.rollouts.sampler import Sampled, Sampler
from flowalign.rollouts.scoring import Scored, Scorer
from rewards import Scores

MOST = 8
"""Parts of an iteration where its settings name no number; flow_grpo scores in as many threads."""


class Draw:
    """The groups of a batch, as an iterator over rounds of parts, whose number the run's settings give (`parts_of`).

    Where they give none, and the reward leaves the device free (`sampler.overlaps`), parts are whole network batches,
    so that they have the numbers of one part.

    Args:
        sampler: samples the groups.
        scorer: scores the samples.
        batch: whole groups.
    """

    def __init__(self, sampler: Sampler, scorer: Scorer, batch: Batch) -> None:
        self.sampler, self.scorer, self.batch = sampler, scorer, batch
        self.parts = parts_of(sampler.config)
        if sampler.overlaps:
            self.parts = len(self._starts(batch))
        self._parts: list[tuple[Any, Batch, Scored | None]] = []

    def __iter__(self) -> Iterator[Sequence[Batch]]:
        """Yield the parts to sample, round by round; a plain draw has one round. Samples of an earlier attempt, which
        ran out of memory, are dropped."""
        self._parts = []
        yield self.split(self.batch)

    def split(self, batch: Batch) -> Sequence[Batch]:
        """The parts in which a batch is sampled."""
        if self.sampler.overlaps:
            return batch.cut(self._starts(batch))
        return batch.split(min(self.parts, len(set(batch.group))))

    def _starts(self, batch: Batch) -> list[int]:
        """Rows where parts of whole network batches begin."""
        starts = self.sampler.cuts(batch)
        count = min(MOST, len(starts))
        return [starts[i * len(starts) // count] for i in range(count)]

    def put(self, rollout: object, batch: Batch, scored: Scored | None) -> None:
        """Add the samples of a part. Raises if scoring of an earlier one failed, so that no further part is sampled.

        Args:
            batch: the rollout's samples; an algorithm that branches makes several groups of a prompt.
            scored: their scores to come; None if they are not scored.
        """
        self._parts.append((None if rollout is None else self.sampler.stored(rollout), batch, scored))
        for _, _, earlier in self._parts:
            if earlier is not None and earlier.future.done():
                earlier.result()

    def whole(self) -> Sampled[Any, Any]:
        """All samples since the last call, with their scores, as one."""
        parts = [
            Sampled(
                rollout=rollout,
                batch=batch,
                scores=None if scored is None else scored.result(),
                sampler=self.sampler,
                scorer=self.scorer,
            )
            for rollout, batch, scored in self._parts
        ]
        self._parts = []
        if self.scorer.unsure:
            return self._at_once(parts)
        return parts[0] if len(parts) == 1 else Sampled.cat(parts)

    def _at_once(self, parts: Sequence[Sampled[Any, Any]]) -> Sampled[Any, Any]:
        """All samples as one, scored again, together."""
        # those that the algorithm adds stay; a part whose replies cannot be read has no others
        shared = [name for name in parts[0].scores.parts if all(name in part.scores.parts for part in parts)]
        values = [Scores(part.scores.value, {name: part.scores.parts[name] for name in shared}) for part in parts]
        sampled = Sampled.cat([replace(part, scores=scores) for part, scores in zip(parts, values, strict=True)])
        scores = self.scorer.at_once(self.sampler.decode(sampled.rollout), sampled.batch)
        return replace(sampled, scores=replace(scores, parts=sampled.scores.parts | scores.parts))


def parts_of(config: BaseConfig) -> int:
    """Number of parts that settings name: `rollout.overlap`, and at least one for each worker."""
    workers = config.rollout.workers
    return max(config.rollout.overlap or 1, workers.count if workers else 1)
