"""The process that learns as the engine: it samples each part itself, when the part is asked for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flowalign.algorithms.base import Algorithm
from flowalign.data.batches import Batch
from flowalign.rollouts.engine import Generated, SamplingWeights
from flowalign.rollouts.sampler import Sampler


@dataclass
class Own:
    """The weights that the policy has; nothing is copied."""

    weights: SamplingWeights


@dataclass(kw_only=True)
class Here:
    """A part that is sampled by this process, once its samples are asked for.

    Args:
        algorithm: the run's.
    """

    algorithm: Algorithm
    sampler: Sampler
    part: Batch

    def result(self) -> Generated:
        rollout, batch = self.algorithm.rollout(self.sampler, self.part)
        return Generated(rollout, batch, self.algorithm.decode(self.sampler, rollout))


class Trainside:
    """The process that learns samples itself.

    Args:
        algorithm: the run's.
    """

    def __init__(self, algorithm: Algorithm, sampler: Sampler) -> None:
        self.algorithm, self.sampler = algorithm, sampler

    def publish(self, iteration: int, parameters: Mapping[str, Tensor], state: dict[str, Any]) -> Own:
        return Own(SamplingWeights(iteration, {}, state))

    def republish(self, weights: SamplingWeights) -> Own:
        return Own(weights)

    def generate(self, parts: Sequence[Batch], published: Any = None) -> list[Here]:
        return [Here(algorithm=self.algorithm, sampler=self.sampler, part=part) for part in parts]

    def measured(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass
