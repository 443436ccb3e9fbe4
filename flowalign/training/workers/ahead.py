"""Iterations that an engine samples before their turn, each with the weights at the time it was begun."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flowalign.data.batches import Batch
from flowalign.rollouts.draw import Draw
from flowalign.rollouts.engine import RolloutEngine, SamplingWeights, SentWeights, Task
from flowalign.rollouts.groups import Groups


@dataclass(kw_only=True)
class Begun:
    """An iteration that the engine has begun to sample."""

    draw: Draw
    engine: RolloutEngine
    published: SentWeights
    picks: list[int]
    """Numbers of the prompts of all processes."""
    tasks: Sequence[Task]
    """Tasks of the first round of parts, until they are asked for."""

    def generate(self, parts: Sequence[Batch]) -> Sequence[Task]:
        """The tasks of these parts: those that were begun before, or new ones with the same weights."""
        tasks, self.tasks = self.tasks, ()
        return tasks or self.engine.generate(parts, self.published)


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

    def next(self, first: int, parameters: Mapping[str, Tensor], state: dict[str, Any]) -> Begun:
        """An iteration's groups and their tasks; later iterations begin with the weights before it.

        Args:
            first: number of the iteration.
            parameters: the trained weights by name.
            state: other values on which samples depend, as JSON; see `SamplingWeights.rest`.
        """
        published = self.engine.publish(first, parameters, state)
        last = max(first, min(first + self.staleness, self.iterations - 1))
        for iteration in range(first + len(self.begun), last + 1):
            self._begin(iteration, published, self.groups.picks(iteration))
        return self.begun.popleft()

    def _begin(self, iteration: int, published: SentWeights, picks: list[int]) -> None:
        draw = self.groups.draw(iteration, picks)
        tasks = self.engine.generate(draw.split(draw.batch), published)
        self.begun.append(Begun(draw=draw, engine=self.engine, published=published, picks=picks, tasks=tasks))

    # In a checkpoint: iterations that were begun, to begin them again with the weights of that time

    def state(self) -> tuple[dict[str, dict[str, Tensor]], list[dict[str, Any]]]:
        """Tensors by file, and JSON."""
        tensors, lines = {}, []
        for begun in self.begun:
            weights = begun.published.weights
            tensors[f"sampling_{weights.iteration}"] = weights.tensors
            lines.append(
                {
                    "iteration": begun.draw.batch.iteration,
                    "picks": begun.picks,
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
