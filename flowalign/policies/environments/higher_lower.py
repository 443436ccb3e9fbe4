"""The game of higher and lower."""

from collections.abc import Mapping
from typing import Any

from flowalign.errors import ConfigError
from flowalign.policies.environments.base import Answer


class HigherLower:
    """A whole number is to be found; wrong ones are answered by whether it is higher or lower.

    The right number pays 1 and ends the episode. What a turn is taken in is between which numbers the right one is
    known to be, so that members of a group meet in one state though they said different numbers.

    Args:
        key: key of the right number in the metadata.
        higher, lower: what is answered where the right number is higher, or lower, than the one given.
        unclear: answer to a text that is no whole number.
    """

    name = "higher_lower"

    def __init__(self, key: str = "answer", higher: str = "+", lower: str = "-", unclear: str = "=") -> None:
        self.key, self.higher, self.lower, self.unclear = key, higher, lower, unclear

    def reset(self, prompt: str, metadata: Mapping[str, Any]) -> str:
        try:
            self.right = int(metadata[self.key])
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"environment 'higher_lower' needs a whole number under '{self.key}' in the metadata; the prompt "
                f"{prompt!r} has {metadata.get(self.key)!r}"
            ) from error
        self.above: int | None = None
        """The largest number given that is too small."""
        self.below: int | None = None
        return prompt

    def step(self, completion: str) -> Answer:
        try:
            given = int(completion)
        except ValueError:
            return Answer(self.unclear, state=self._state())
        if given == self.right:
            return Answer("", reward=1.0, done=True)
        if given < self.right:
            self.above = given if self.above is None else max(given, self.above)
            return Answer(self.higher, state=self._state())
        self.below = given if self.below is None else min(given, self.below)
        return Answer(self.lower, state=self._state())

    def _state(self) -> str:
        return f"{self.above}..{self.below}"
