"""What stands in for groups that teach nothing."""

from pydantic import Field

from flowalign.settings import Section


class DynamicSampling(Section):
    """Groups that teach nothing are replaced by groups of further prompts: see `flowalign.rollouts.groups`."""

    rounds: int = Field(10, ge=2)
    """Largest number of rounds of sampling, the first included."""
    spread: float = Field(0.0, ge=0)
    """Standard deviation of a group's rewards above which it is used."""
    low: float | None = None
    high: float | None = None
    """Bounds of the mean reward of a group that is used, both included; null: none."""


class ReplaySettings(Section):
    """Groups that teach nothing are replaced by groups of earlier iterations."""

    groups: int = Field(64, ge=1)
    """Largest number of stored groups."""
    age: int = Field(8, ge=1)
    """Iterations after which a group is deleted."""
    share: float = Field(0.0, ge=0, lt=1)
    """Share of an iteration's groups that are earlier ones, even where the new ones, which are stored, teach."""
    until: int | None = Field(None, ge=1)
    """Iteration from which on no earlier group is used."""
