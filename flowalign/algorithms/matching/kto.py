"""Diffusion-KTO: learn from pictures that are each good or bad, without pairs (arXiv 2404.04465).

The gain g of a picture is how much lower the policy's error than the reference's is on it. Loss:
w * (1 - sigmoid(sign * beta * (g - offset))), where the sign is +1 of good and -1 of bad pictures, and the offset the
mean gain of all of them, at least 0: what is better or worse than the policy's pictures are on average.

Departure: the offset is of a whole iteration, before its updates, and not of a micro-batch, so that it is the same
however an iteration is divided; each iteration evaluates both networks once more for it.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from flowalign.algorithms.matching import base
from flowalign.algorithms.matching.files import FileSettings, SampledFiles
from flowalign.algorithms.matching.targets import TargetMatching
from flowalign.config import Data
from flowalign.data import Labels
from flowalign.rollouts.pictures import DiffusionSampler
from flowalign.rollouts.processes import Processes


class KTOSettings(FileSettings):
    beta: float = Field(1000.0, gt=0)
    """Factor of the squared error's mean over elements; published: 1000 for SD1.5."""
    good_weight: float = Field(1.0, ge=0)
    bad_weight: float = Field(1.0, ge=0)
    positive_ratio: float | None = Field(None, gt=0, lt=1)
    """Share of good pictures among those that are drawn; null: the file's; published: 0.8."""
    utility: Literal["sigmoid", "loss_averse"] = "sigmoid"
    """Utility of a picture's gain: a sigmoid, or its logarithm, which never stops caring about wrong pictures."""


class KTO(TargetMatching):
    """Diffusion-KTO: pictures that are each labelled good or bad, without pairs (arXiv 2404.04465)."""

    name = "kto"
    Settings = KTOSettings
    settings: KTOSettings
    data = Labels
    headline = "kto/accuracy"
    compares = frozenset({"reference"})
    offset: Tensor | float = 0.0
    """Mean gain of this iteration's pictures."""

    def read(self, data: Data) -> Labels:
        labels = Labels.of(data).of_both_kinds()
        return labels if self.settings.positive_ratio is None else labels.with_share(self.settings.positive_ratio)

    def lessons(self, sampled: SampledFiles, processes: Processes) -> base.MatchingExperience:
        experience = super().lessons(sampled, processes)
        # a good one counts as 1, a bad one as -1
        labels = [2.0 * record["label"] - 1 for record in sampled.batch.metadata]
        experience.reward = torch.tensor(labels, device=processes.device)
        self.offset = processes.gather(self.gain(sampled.sampler, experience)).mean().clamp(min=0)
        return experience

    @torch.no_grad()
    def gain(self, sampler: DiffusionSampler, experience: base.MatchingExperience) -> Tensor:
        """[N] gains of this process's pictures."""
        chunks = experience.items.split(sampler.config.rollout.batch_size)
        points = [self.points(sampler.policy, experience, chunk) for chunk in chunks]
        return torch.cat([chunk.error_reference - chunk.error for chunk in points])

    def loss(self, points: base.Points) -> tuple[Tensor, dict[str, Tensor]]:
        settings, sign = self.settings, points.reward
        gain = points.error_reference - points.error
        right = sign * settings.beta * (gain - self.offset)
        utility = right.sigmoid() if settings.utility == "sigmoid" else F.logsigmoid(right)
        weight = torch.where(sign > 0, settings.good_weight, settings.bad_weight)
        return weight * (1 - utility), {
            "kto/accuracy": (right > 0).float() + (right == 0) / 2,
            "kto/gain": gain,
            "kto/offset": torch.as_tensor(self.offset).to(gain).expand_as(gain),
        }
