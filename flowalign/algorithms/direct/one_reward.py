"""OneReward (arXiv 2508.21066): one judge for many criteria, each sample against the reference model's picture.

As in RewardDance, a local judge says how probably a late step's picture is better than a fully denoised picture of
the same condition from other noise. The judge is told one criterion of several, drawn for each sample.

Departures, for want of training code: the reference is a snapshot that follows the policy at `reference`'s pace
(decay 1 keeps the start weights); tasks come with the prompts' metadata ('task'), and are not drawn.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from pydantic import Field

from flowalign.algorithms.direct.against_reference import AgainstReference
from flowalign.algorithms.direct.base import uniform
from flowalign.algorithms.direct.late_step import LateStepSettings
from flowalign.policies.settings import Snapshot
from flowalign.rollouts.pictures import DiffusionSampler


class OneRewardSettings(LateStepSettings):
    criteria: list[str] = Field(["text alignment", "consistency", "structure", "aesthetics"], min_length=1)
    """Criteria of which one is drawn for each sample; the judge reads it as metadata 'criterion'."""
    reference: Snapshot = Snapshot(decay=1.0)
    """Snapshot that makes the pictures to compare with."""


class OneReward(AgainstReference):
    """OneReward: one judge told a criterion, against the reference's picture, by ReFL (arXiv 2508.21066)."""

    name = "one_reward"
    Settings = OneRewardSettings
    settings: OneRewardSettings
    template = "one_reward"

    @property
    def snapshots(self) -> Mapping[str, Snapshot]:
        return {"compared": self.settings.reference}

    def referring(self, sampler: DiffusionSampler) -> AbstractContextManager[None]:
        return sampler.policy.snapshot("compared")

    def told(self, seed: int) -> dict[str, Any]:
        number = int(uniform([seed], 10) * len(self.settings.criteria))
        return {"criterion": self.settings.criteria[number]}
