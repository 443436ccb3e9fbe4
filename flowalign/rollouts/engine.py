"""What samples the parts of an iteration: one interface, `generate`, for this process, workers and servers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from flowalign.data.batches import Batch


@dataclass
class SamplingWeights:
    """All that samples depend on besides the batch."""

    iteration: int
    """Iteration that these weights sample for."""
    tensors: dict[str, Tensor]
    """Trained tensors by name, whole and on the CPU."""
    rest: dict[str, Any]
    """JSON: the algorithm's 'progress' and 'updates', and the 'plan' if it adapts."""


class SentWeights(Protocol):
    """Weights where the engine finds them."""

    @property
    def weights(self) -> SamplingWeights: ...


class Generated(NamedTuple):
    """Samples of a part."""

    rollout: Any
    batch: Batch
    """Samples of the rollout; an algorithm that branches makes several groups of a prompt."""
    samples: list[Any] | None
    """Finished samples, as rewards need them; None where nothing is scored."""


class Task(Protocol):
    """A part that an engine samples."""

    def result(self) -> Generated:
        """Wait for the samples."""


Generate = Callable[[Sequence[Batch]], Sequence[Task]]
"""Begins to sample parts, with weights that are settled; returns a task for each."""


class RolloutEngine(Protocol):
    """Samples for a process that learns. Weights are published before parts are generated with them."""

    def publish(self, iteration: int, parameters: Mapping[str, Tensor], state: dict[str, Any]) -> SentWeights:
        """Take the policy's weights of this moment; all processes that learn call it together.

        Args:
            iteration: iteration that they sample for.
            parameters: the trained weights by name.
            state: see `SamplingWeights.rest`.
        """

    def republish(self, weights: SamplingWeights) -> SentWeights:
        """Take weights of an earlier moment, from a checkpoint."""

    def generate(self, parts: Sequence[Batch], published: Any) -> Sequence[Task]:
        """Begin to sample these parts with these weights; return a task for each."""

    def measured(self) -> dict[str, float]:
        """Metrics since the last call."""

    def close(self) -> None:
        """End what was started."""
