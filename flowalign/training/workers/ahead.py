"""Iterations that an engine samples before their turn, each with the weights at the time it was begun."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from flowalign.data.batches import Batch
from flowalign.rollouts.draw import Draw
from flowalign.rollouts.engine import RolloutEngine, SamplingWeights, SentWeights, Task
from flowalign.rollouts.groups import Groups


class EngineWithWeights(NamedTuple):
    """The engine together with the weights to sample with: the `Workers` of a draw."""

    engine: RolloutEngine
    published: SentWeights

    def begin(self, parts: Sequence[Batch]) -> Sequence[Task]:
        return self.engine.generate(parts, self.published)


class Begun(NamedTuple):
    """An iteration that the engine has begun to sample."""

    draw: Draw
    published: SentWeights
    picks: list[int]
    """Numbers of the prompts of all processes."""


class Ahead:
    """Draws the groups of iterations, and keeps the engine busy with the next ones.

    Iteration n is begun with the weights before iteration n - staleness (the first ones with the start weights),
    whatever the timing: the numbers of a run are the same each time, even if workers or servers die.

    Args:
        iterations: number of iterations of the run; none is begun after the last.
    """

    def __init__(self, engine: RolloutEngine, groups: Groups, staleness: int, iterations: int) -> None:
        self.engine, self.groups, self.staleness, self.iterations = engine, groups, staleness, iterations
        self.begun: deque[Begun] = deque()

    def next(self, first: int, parameters: Mapping[str, Tensor], state: dict[str, Any]) -> Draw:
        """The groups of an iteration; later ones begin with the weights before it.

        Args:
            first: number of the iteration.
            parameters: the trained weights by name.
            state: other values on which samples depend, as JSON; see `SamplingWeights.rest`.
        """
        published = self.engine.publish(first, parameters, state)
        last = max(first, min(first + self.staleness, self.iterations - 1))
        for iteration in range(first + len(self.begun), last + 1):
            self._begin(iteration, published, self.groups.picks(iteration))
        return self.begun.popleft().draw

    def _begin(self, iteration: int, published: SentWeights, picks: list[int]) -> None:
        draw = self.groups.draw(iteration, EngineWithWeights(self.engine, published), picks)
        draw.begin()
        self.begun.append(Begun(draw, published, picks))

    # In a checkpoint: iterations that were begun, to begin them again with the weights of that time

    def state(self) -> tuple[dict[str, dict[str, Tensor]], list[dict[str, Any]]]:
        """Tensors by file, and JSON."""
        tensors, lines = {}, []
        for draw, published, picks in self.begun:
            weights = published.weights
            tensors[f"sampling_{weights.iteration}"] = weights.tensors
            lines.append(
                {
                    "iteration": draw.batch.iteration,
                    "picks": picks,
                    "weights": weights.iteration,
                    "rest": weights.rest,
                }
            )
        return tensors, lines

    def load_state(self, tensors: dict[str, dict[str, Tensor]], lines: list[dict[str, Any]]) -> None:
        """The inverse of `state`."""
        published: dict[int, SentWeights] = {}
        for begun in lines:
            number = begun["weights"]
            if number not in published:
                published[number] = self.engine.republish(
                    SamplingWeights(number, tensors[f"sampling_{number}"], begun["rest"])
                )
            self._begin(begun["iteration"], published[number], begun["picks"])
