"""Which prompts an iteration trains on; for pictures and texts alike.

A selection picks numbers of prompts, is told how the groups fared, and keeps its state in checkpoints. Every process
makes the same picks and is told of the groups of all.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from flowalign.data import Prompts


class Selection(Protocol):
    """Picks the prompts of an iteration."""

    def picks(self, prompts: Prompts, iteration: int, groups: int, seed: int, round: int = 0) -> list[int]:
        """Numbers of prompts, one a group, the same on every process.

        Args:
            round: 0 draws the iteration's groups; further rounds draw some in the place of those that taught nothing.
        """

    def learn(self, picks: Sequence[int], prompts: Prompts, success: Sequence[float], gain: Sequence[float]) -> None:
        """Told of groups before they are learned from, or as they are replaced.

        Args:
            picks: as of `picks`.
            success: mean reward of each group.
            gain: mean size of its advantages.
        """

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, as JSON."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
