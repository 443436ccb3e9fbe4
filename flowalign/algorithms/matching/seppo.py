"""SePPO: a picture to learn from against the sample of an earlier self (arXiv 2410.05255).

After the abstract: there is no training code. The chosen pictures come from the data. The rejected ones are sampled
from an earlier checkpoint, the snapshot `old`, which is also what gains are measured against: by how much the policy's
error is lower than its own. And a sample need not be worse: whether it counts as rejected is asked of the policy.

Assumed: the earlier checkpoint is a lagging copy of the weights (`old`); a sample is truly worse while the policy does
not gain on it, and where it does, as on what it learns from, its sign is flipped.
"""

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms.matching import base
from flowalign.algorithms.matching.files import SampledFiles, latents
from flowalign.algorithms.matching.pairs import PairMatching, PairSettings, judged
from flowalign.config import Data
from flowalign.core.step_losses import preference_loss
from flowalign.data import Prompts, Targets
from flowalign.policies.settings import Snapshot
from flowalign.rollouts.processes import Processes


class SePPOSettings(PairSettings):
    beta: float = Field(2000.0, gt=0)
    """Factor of the squared error's mean over elements."""
    old: Snapshot = Snapshot(decay=0.9)
    """Snapshot that samples the rejected pictures."""
    anchor: bool = True
    """Whether samples that the policy gains on count with the other sign; otherwise all samples are rejected."""


class SePPO(PairMatching):
    """SePPO: pictures of the data against samples of an earlier self, after the abstract (arXiv 2410.05255)."""

    name = "seppo"
    Settings = SePPOSettings
    settings: SePPOSettings
    compares = frozenset({"old"})

    @property
    def snapshots(self) -> Mapping[str, Snapshot]:
        return {"old": self.settings.old}

    @property
    def sampling_weights(self) -> str:
        return "old"

    def read(self, data: Data) -> Prompts:
        return Targets.of(data)

    def lessons(self, sampled: SampledFiles, processes: Processes) -> base.MatchingExperience:
        sampler, batch = sampled.sampler, sampled.batch
        rollout = sampler.rollout(batch, torch.zeros(sampler.config.rollout.steps))
        drawn = rollout.whole(rollout.trajectory.final)
        return self.learned(sampler, batch, [latents(sampler, batch, "target"), drawn])

    def loss(self, points: base.Points) -> tuple[Tensor, dict[str, Tensor]]:
        chosen, sampled = (points.error_old - points.error).chunk(2)
        worse = sampled <= 0
        sign = torch.where(worse, 1.0, -1.0) if self.settings.anchor else 1.0
        logit = self.settings.beta / 2 * (chosen - sign * sampled)
        return preference_loss(logit), judged(logit, chosen, sampled) | {"seppo/worse": worse.float()}
