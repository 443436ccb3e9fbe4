"""RAFT: fine-tune on the best of the policy's own samples (arXiv 2304.06767; `sft` in Flow-GRPO's code).

The best of each group, or of the whole iteration, are matched as if they were data; the others are left out. Samples
of one reward are kept or left out together.
"""

from pydantic import Field
from torch import Tensor

from flowalign.algorithms.matching.base import Points
from flowalign.algorithms.matching.online import OnlineMatching, OnlineSettings
from flowalign.core.record import Record


class RAFTSettings(OnlineSettings):
    best: int = Field(1, ge=1)
    """Number of best samples of each group to learn from."""
    share: float | None = Field(None, gt=0, le=1)
    """Share of best samples of the whole iteration, in the place of `best`."""


class RAFT(OnlineMatching):
    """RAFT: fine-tuning on the best own samples (arXiv 2304.06767)."""

    name = "raft"
    Settings = RAFTSettings
    settings: RAFTSettings

    def kept(self, record: Record) -> Tensor:
        reward, group = record.reward, record.group
        if self.settings.share is not None:
            return reward >= reward.quantile(1 - self.settings.share)
        better = (group[:, None] == group) & (reward > reward[:, None])
        return better.sum(1) < self.settings.best

    def credit(self, record: Record) -> Tensor:
        return self.kept(record).float()

    def loss(self, points: Points) -> tuple[Tensor, dict[str, Tensor]]:
        return points.error, {}
