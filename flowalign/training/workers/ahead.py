"""Iterations whose samples workers are at before their turn comes, each with the weights of the time it was begun."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from flowalign.data.batches import Batch
from flowalign.rollouts.draw import Draw
from flowalign.rollouts.groups import Groups
from flowalign.training.distributed.sharding import whole
from flowalign.training.workers.fleet import Fleet, PublishedWeights, Task
from flowalign.training.workers.worker import SamplingWeights


class FleetWithWeights(NamedTuple):
    """The fleet with weights to sample with: the `Workers` of a draw."""

    fleet: Fleet
    published: PublishedWeights

    def begin(self, parts: Sequence[Batch]) -> list[Task]:
        return self.fleet.begin(parts, self.published)


class Begun(NamedTuple):
    """An iteration that workers are at."""

    draw: Draw
    published: PublishedWeights
    picks: list[int]
    """Numbers of the prompts of all processes."""


class Ahead:
    """Draws the groups of iterations, and keeps workers busy with those to come.

    Iteration n is begun with the weights before iteration n - staleness (the first ones with the start weights),
    whatever the timing: the numbers of a run are the same each time, also where workers died.

    Args:
        iterations: of the run, after which nothing is begun.
    """

    def __init__(self, fleet: Fleet, groups: Groups, staleness: int, iterations: int) -> None:
        self.fleet, self.groups, self.staleness, self.iterations = fleet, groups, staleness, iterations
        self.begun: deque[Begun] = deque()

    def next(self, first: int, parameters: Mapping[str, Tensor], told: dict[str, Any]) -> Draw:
        """The groups of an iteration; later ones begin with the weights before it.

        Args:
            first: number of the iteration.
            parameters: the trained weights by name.
            told: what else samples depend on, JSON, as of `SamplingWeights`.
        """
        tensors = whole(dict(parameters), keep=True)
        # as they are now, whatever the updates make of them
        weights = SamplingWeights(first, {name: tensor.clone() for name, tensor in tensors.items()}, told)
        published = self.fleet.put(weights)
        last = max(first, min(first + self.staleness, self.iterations - 1))
        for iteration in range(first + len(self.begun), last + 1):
            self._begin(iteration, published, self.groups.picks(iteration))
        return self.begun.popleft().draw

    def _begin(self, iteration: int, published: PublishedWeights, picks: list[int]) -> None:
        draw = self.groups.draw(iteration, FleetWithWeights(self.fleet, published), picks)
        draw.begin()
        self.begun.append(Begun(draw, published, picks))

    # For the checkpoint: what was begun is begun again, with the weights of its time

    def state(self) -> tuple[dict[str, dict[str, Tensor]], list[dict[str, Any]]]:
        """Tensors by file, and JSON."""
        tensors, rest = {}, []
        for draw, published, picks in self.begun:
            weights = published.weights
            tensors[f"sampling_{weights.iteration}"] = weights.tensors
            rest.append(
                {
                    "iteration": draw.batch.iteration,
                    "picks": picks,
                    "weights": weights.iteration,
                    "rest": weights.rest,
                }
            )
        return tensors, rest

    def load_state(self, tensors: dict[str, dict[str, Tensor]], rest: list[dict[str, Any]]) -> None:
        """The inverse of `state`."""
        published: dict[int, PublishedWeights] = {}
        for begun in rest:
            number = begun["weights"]
            if number not in published:
                published[number] = self.fleet.put(
                    SamplingWeights(number, tensors[f"sampling_{number}"], begun["rest"])
                )
            self._begin(begun["iteration"], published[number], begun["picks"])
