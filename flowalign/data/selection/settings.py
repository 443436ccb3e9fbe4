"""What stands in for groups that teach nothing."""

from pydantic import Field

from flowalign.settings import Section


class DynamicSampling(Section):
    """Groups that teach nothing are replaced by groups of further prompts: see `flowalign.rollouts.groups`."""

    rounds: int = Field(10, ge=2)
    """of drawing at most, the first included"""
    spread: float = Field(0.0, ge=0)
    """a group is kept whose rewards have a larger standard deviation than this"""
    low: float | None = None
    high: float | None = None
    """and whose mean reward is not below and not above these"""


class ReplaySettings(Section):
    """Groups that teach nothing are replaced by groups of earlier iterations."""

    groups: int = Field(64, ge=1)
    """how many are kept at most"""
    age: int = Field(8, ge=1)
    """iterations after which one is forgotten"""
