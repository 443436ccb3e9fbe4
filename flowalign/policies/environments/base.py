"""What an environment is: it begins with a prompt, and answers every completion."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol


class Answer(NamedTuple):
    """Answer of an environment to a completion; (observation, reward, done) is one too."""

    observation: str
    """Text that the model reads next; nobody reads the last one."""
    reward: float = 0.0
    done: bool = False
    state: str | None = None
    """Name of the next turn's state, by which GiGPO finds turns in one state; default: the observation."""
    messages: list[dict[str, Any]] | None = None
    """The observation as messages of a chat, such as answers of tools; default: one of the user."""


class Environment(Protocol):
    """One episode at a time; there is an object for each one that is under way.

    The members of a group begin alike: what is random must follow from the prompt and its metadata.
    """

    def reset(self, prompt: str, metadata: Mapping[str, Any]) -> str:
        """Begin an episode.

        Returns:
            what the model gets in the place of the prompt, often the prompt itself.
        """

    def step(self, completion: str) -> Answer | tuple[str, float, bool]:
        """Answer a completion, which is cut where it came to `max_new_tokens`."""
