"""The groups of one iteration: the batches to sample, and what was sampled of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from flowalign.config import BaseConfig
from flowalign.data.batches import Batch
from flowalign.rollouts.base import Actor
from flowalign.rollouts.scoring import Scored
from rewards import Scores


@dataclass
class Sampled:
    """What was sampled of whole groups."""

    rollout: Any
    batch: Batch
    scores: Any = None
    """`Scores`; None where the algorithm does not have its samples scored"""
    sampler_log_prob: Tensor | None = None
    """[B, T] of whoever sampled, where the rollout was scored again by the current weights"""


class Made(NamedTuple):
    """What was made of a part."""

    rollout: Any
    batch: Batch
    """of the rollout's samples"""
    samples: list[Any] | None
    """finished, as rewards need them; None where the algorithm does not have them scored"""
    forwards: int = 0
    """that it took in another process"""


class Workers(Protocol):
    """Other processes that sample with the algorithm of the run, from given weights."""

    def begin(self, parts: Sequence[Batch]) -> list[Any]:
        """Begin with these parts; a task for each."""


class Draw:
    """The groups of a batch, an iterator over their parts: as many as the run's settings say (`parts_of`).

    Args:
        actor: whose samples they are.
        batch: whole groups.
        workers: sample them; None: the actor does.
    """

    def __init__(self, actor: Actor, batch: Batch, workers: Workers | None = None) -> None:
        self.actor, self.batch, self.workers = actor, batch, workers
        self.parts = parts_of(actor.config)
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

    def whole(self) -> Sampled:
        """All that was sampled since the last call, with its scores."""
        parts = [
            Sampled(rollout, batch, None if scored is None else scored.result())
            for rollout, batch, scored in self._parts
        ]
        self._parts = []
        return joined(self.actor, parts)


def parts_of(config: BaseConfig) -> int:
    """Parts that an iteration's groups are sampled in: `rollout.overlap`, and at least one for each worker."""
    workers = getattr(config.rollout, "workers", None)
    return max(getattr(config.rollout, "overlap", 1), workers.count if workers else 1)


def joined(actor: Actor, parts: Sequence[Sampled]) -> Sampled:
    """Several parts as one."""
    if len(parts) == 1:
        return parts[0]
    rollouts = [part.rollout for part in parts if part.rollout is not None]
    scores = [part.scores for part in parts if part.scores is not None]
    return Sampled(
        actor.sampler.cat(rollouts) if rollouts else None,
        Batch.cat([part.batch for part in parts]),
        Scores.cat(scores) if scores else None,
    )
