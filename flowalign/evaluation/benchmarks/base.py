"""What a suite is: prompts, pictures a prompt, scores of a sample by name, and which of them make the headline."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from flowalign.data import Prompts
from rewards import Metadata, Reward, score

SampleScores = dict[str, float | list[float]]
"""Scores of a sample by name; a list counts as so many. A name that does not apply is left out."""


class Suite:
    """A protocol that figures can be compared under. Subclass it, with a `name`.

    A score's mean is over everything that samples gave under its name; the headline, 'overall', is the mean of the
    means named in `headline`. What may be set, such as a judge, stands in the results beside the version.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    """Version, raised whenever the same model would get another figure."""
    pictures: ClassVar[int] = 4
    """Samples of a prompt."""
    videos: ClassVar[bool] = False
    """Whether its samples are videos."""
    headline: ClassVar[tuple[str, ...]]
    """Names of the scores whose mean is 'overall'."""

    def prompts(self) -> Prompts:
        """The prompts, always the same and in the same order; metadata say what is asked of each."""
        raise NotImplementedError

    def score(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> list[SampleScores]:
        """What each sample gets, in itself alone: how samples come together in a call must not matter."""
        raise NotImplementedError

    def settings(self) -> Mapping[str, Any]:
        """What was set besides the protocol, as JSON: it stands in the results."""
        return {}


def columns(
    reward: Reward, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata
) -> list[dict[str, float]]:
    """A reward's value and parts as one record a sample; parts that do not apply are left out."""
    scores = score(reward, samples, prompts, metadata)
    named = {"value": scores.value} | scores.parts
    rows = zip(*(values.tolist() for values in named.values()), strict=True)
    return [{name: value for name, value in zip(named, row, strict=True) if value == value} for row in rows]
