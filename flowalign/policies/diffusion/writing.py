"""What is written before a picture is drawn: words for its text encoders, or the picture's own tokens."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from samplers import Rows


@dataclass(kw_only=True)
class Written:
    """What a writer has written for B samples."""

    texts: list[str]
    """[B] texts for the pipeline's text encoders."""
    record: Rows
    """The B rows of tokens as they were sampled, to be scored again."""
    arguments: dict[str, Tensor] = field(default_factory=dict)
    """Further arguments of the pipeline's call, [B, ...] each."""


class AnyWriter(Protocol):
    """A language model that writes before the pipeline draws."""

    component: str
    """Name of its folder beside the generator's weights."""
    lora: bool
    """An adapter is trained, so that the start weights are there."""

    def write(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        noise_seeds: Sequence[int],
        call: Mapping[str, Any],
        batch_size: int,
    ) -> Written:
        """Write for B samples.

        Args:
            seeds: B seeds of the start noise.
            noise_seeds: B seeds of the step noise.
            call: arguments of the pipeline's call, such as height and width.
            batch_size: samples a network call, which does not change what is written.
        """

    def reference(self) -> AbstractContextManager[None]:
        """Within it the start weights write."""

    def save(self, folder: str | Path, weights: dict[str, Tensor] | None = None) -> None:
        """Write what transformers loads."""
