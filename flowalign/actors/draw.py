"""The groups of one iteration: the batches to sample, and what was sampled of them."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from flowalign.actors.base import Actor
from flowalign.actors.scoring import Scoring
from flowalign.data.batches import Batch
from rewards import Scores


class Sampled(NamedTuple):
    """What was sampled of whole groups."""

    rollout: Any
    batch: Batch
    scores: Scores


class Draw:
    """The groups of a batch, to be sampled and scored in as many parts as `rollout.overlap` says.

    Args:
        actor: whose samples they are.
        batch: whole groups.
    """

    def __init__(self, actor: Actor, batch: Batch) -> None:
        self.actor, self.batch = actor, batch
        self.scoring = Scoring(self.overlap > 1, actor.add_seconds)
        self._parts: list[tuple[Any, Batch, Future[Scores]]] = []

    @property
    def overlap(self) -> int:
        return getattr(self.actor.config.rollout, "overlap", 1)

    def sampled(
        self, sample: Callable[[Any, Batch], tuple[Any, Batch]], score: Callable[[Any, Sequence[Any], Batch], Scores]
    ) -> Sampled:
        """Sample all groups, and score what was sampled.

        Args:
            sample: (actor, batch) -> a rollout, and the batch of its samples.
            score: (actor, samples, batch) -> scores; may run in a thread of its own while further groups are sampled.
        """
        with self.scoring as scoring:
            for batch in self:
                rollout, batch = sample(self.actor, batch)
                samples = self.actor.decode(rollout)
                self.put(rollout, batch, scoring.submit(score, self.actor, samples, batch))
            return self.whole()

    def __iter__(self) -> Iterator[Batch]:
        """From the start, whatever was put before: an attempt that ran out of memory is made again."""
        self._parts = []
        yield from self._split(self.batch)

    def _split(self, batch: Batch) -> Iterator[Batch]:
        for part in batch.split(min(self.overlap, len(set(batch.group)))):
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


def joined(actor: Actor, parts: Sequence[Sampled]) -> Sampled:
    """Several parts as one."""
    if len(parts) == 1:
        return parts[0]
    rollouts, batches, scores = zip(*parts, strict=True)
    return Sampled(actor.cat(rollouts), Batch.cat(batches), Scores.cat(scores))
