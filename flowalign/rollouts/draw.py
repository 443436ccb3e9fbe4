"""The groups of one iteration: the batches to sample, and what was sampled of them."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from flowalign.config import BaseConfig
from flowalign.data.batches import Batch
from flowalign.rollouts.base import Actor
from flowalign.rollouts.scoring import Scoring
from rewards import Scores


class Sampled(NamedTuple):
    """What was sampled of whole groups."""

    rollout: Any
    batch: Batch
    scores: Scores


class Made(NamedTuple):
    """What was made of a part."""

    rollout: Any
    batch: Batch
    """of the rollout's samples"""
    samples: list[Any]
    forwards: int = 0
    """that it took in another process"""


class Workers(Protocol):
    """Other processes that sample with the algorithm of the run, from given weights."""

    def begin(self, parts: Sequence[Batch]) -> list[Any]:
        """Begin with these parts; a task for each."""

    def result(self, task: Any) -> Made:
        """What was made of a part, once it is there."""


class Draw:
    """The groups of a batch, to be sampled and scored in parts: as many as the run's settings say (`parts_of`).

    Args:
        actor: whose samples they are.
        batch: whole groups.
        workers: sample them; None: the actor does.
    """

    def __init__(self, actor: Actor, batch: Batch, workers: Workers | None = None) -> None:
        self.actor, self.batch, self.workers = actor, batch, workers
        self.parts = parts_of(actor.config)
        self.scoring = Scoring(self.parts > 1, actor.add_seconds)
        self._begun: list[tuple[Batch, Any]] = []
        self._parts: list[tuple[Any, Batch, Future[Scores]]] = []

    def begin(self) -> None:
        """Let the workers begin with what `sampled` will wait for."""
        self._begun = self._shared(self.batch)

    def sampled(
        self, sample: Callable[[Any, Batch], tuple[Any, Batch]], score: Callable[[Any, Sequence[Any], Batch], Scores]
    ) -> Sampled:
        """Sample all groups, and score what was sampled.

        Args:
            sample: (actor, batch) -> a rollout, and the batch of its samples.
            score: (actor, samples, batch) -> scores; may run in a thread of its own while further groups are sampled.
        """
        with self.scoring as scoring:
            for part, task in self:
                made = self._made(part, task, sample)
                self.put(made.rollout, made.batch, scoring.submit(score, self.actor, made.samples, made.batch))
            return self.whole()

    def _made(self, part: Batch, task: Any, sample: Callable[[Any, Batch], tuple[Any, Batch]]) -> Made:
        if self.workers is None:
            rollout, batch = sample(self.actor, part)
            return Made(rollout, batch, self.actor.decode(rollout))
        made = self.workers.result(task)
        self.actor.policy.forwards += made.forwards
        return made

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
                if scored.done():
                    # nothing more is sampled where scoring failed
                    self.scoring.result(scored)

    def put(self, rollout: Any, batch: Batch, scored: "Future[Scores]") -> None:
        """What was sampled of the last batch.

        Args:
            batch: the samples of the rollout; an algorithm that branches makes several groups of a prompt.
        """
        self._parts.append((rollout, batch, scored))

    def whole(self) -> Sampled:
        """All that was sampled since the last call, with its scores."""
        parts = [Sampled(rollout, batch, self.scoring.result(scored)) for rollout, batch, scored in self._parts]
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
    rollouts, batches, scores = zip(*parts, strict=True)
    return Sampled(actor.cat(rollouts), Batch.cat(batches), Scores.cat(scores))
