"""Base of suites: prompts, pictures per prompt, scores of a sample by name, and the names that make the headline."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from flowalign.data import Prompts
from rewards import Metadata, Reward, score

SampleScores = dict[str, float | list[float]]
"""Scores of a sample by name; each value of a list counts as one. A name that does not apply is left out."""


class Suite:
    """A protocol under which figures can be compared. Subclass it, with a `name`.

    A score's mean is over all values that samples gave under its name; the headline, 'overall', is the mean of the
    means named in `headline`. Settings, such as a judge, are written to the results with the version.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    """Version; it is raised whenever the same model would get another figure."""
    pictures: ClassVar[int] = 4
    """Samples of a prompt."""
    videos: ClassVar[bool] = False
    """Whether its samples are videos."""
    headline: ClassVar[tuple[str, ...]]
    """Names of the scores whose mean is 'overall'."""
    gate: ClassVar[str | None] = None
    """Score that must not rise by training: a command that sees a rise beyond the error ends with exit code 1."""

    def prompts(self) -> Prompts:
        """The prompts, always the same and in the same order; their metadata say what the scores need."""
        raise NotImplementedError

    def score(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> list[SampleScores]:
        """Score each sample on its own: the result must not depend on which samples share a call."""
        raise NotImplementedError

    def settings(self) -> Mapping[str, Any]:
        """Settings besides the protocol, as JSON; they are written to the results."""
        return {}


def columns(
    reward: Reward, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata
) -> list[dict[str, float]]:
    """A reward's value and parts as one record per sample; parts that do not apply are left out."""
    scores = score(reward, samples, prompts, metadata)
    named = {"value": scores.value} | scores.parts
    rows = zip(*(values.tolist() for values in named.values()), strict=True)
    return [{name: value for name, value in zip(named, row, strict=True) if value == value} for row in rows]
