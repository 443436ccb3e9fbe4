"""SRUM: a model's own pictures, learned or unlearned region by region as a judge says (arXiv 2510.12784).

A line has a picture, which the model made, and what a judge said of it: a reward in [-1, 1] for each box and for the
rest. At each place of the noised picture the squared error of the velocity that leads back to it is weighed by the
reward there; a tenth of the error of another picture's velocity, by default of its own, is added to all of it.

The authors' judge is the model's own understanding half, whose rewards are never below 0, so that nothing is unlearned;
here judging comes before training, by whatever judge writes the lines.
"""

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms.matching import base
from flowalign.algorithms.matching.files import FileSettings, SampledFiles, latents
from flowalign.algorithms.matching.targets import TargetMatching
from flowalign.data import Judged
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.rollouts.processes import Processes


class SRUMSettings(FileSettings):
    anchor_weight: float = Field(0.1, ge=0)
    """Weight of the error of the picture's 'anchor', by default of its own; published: 0.1."""


@dataclass(kw_only=True)
class SRUMExperience(base.MatchingExperience):
    rewards: Tensor | None = None
    """[B, 1, ..., H, W] reward at each place of the latents."""
    anchors: Tensor | None = None
    """[B, ...] latents of the anchors."""


class SRUM(TargetMatching):
    """SRUM: own pictures with a reward for every region, from a judge that returns boxes (arXiv 2510.12784)."""

    name = "srum"
    Settings = SRUMSettings
    settings: SRUMSettings
    data = Judged

    def lessons(self, sampled: SampledFiles, processes: Processes) -> SRUMExperience:
        plain = super().lessons(sampled, processes)
        x0 = plain.clean.x0
        rewards = torch.stack([reward_map(record, *x0.shape[-2:]) for record in sampled.batch.metadata])
        anchors = latents(sampled.sampler, sampled.batch, "anchor")
        return SRUMExperience(
            **vars(plain), rewards=rewards.view(len(x0), *[1] * (x0.dim() - 3), *x0.shape[-2:]).to(x0), anchors=anchors
        )

    def losses(
        self, policy: DiffusersPolicy, experience: base.MatchingExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert (
            isinstance(experience, SRUMExperience) and experience.rewards is not None and experience.anchors is not None
        )
        points = self.points(policy, experience, items)
        noised, rows = points.noised, points.noised.samples
        error = experience.rewards[rows] * (points.velocity - noised.velocity).square()
        rewarded = noised.error_weight * error.flatten(1).mean(1)
        held = noised.error(points.velocity, noised.noise - experience.anchors[rows])
        penalty, values = self.penalized(torch.zeros_like(held), points)
        return rewarded + self.settings.anchor_weight * held + penalty, values | {"srum/rewarded_error": rewarded}


def reward_map(record: dict[str, object], height: int, width: int) -> Tensor:
    """[height, width] a judged picture's reward at each place: of the last box over it, or of the background."""
    y = (torch.arange(height) + 0.5)[:, None] / height
    x = (torch.arange(width) + 0.5) / width
    rewards = torch.full((height, width), float(record["background"]))  # type: ignore[arg-type]
    for region in record["regions"]:  # type: ignore[attr-defined]
        left, top, right, bottom = region["box"]
        rewards[(y >= top) & (y < bottom) & (x >= left) & (x < right)] = region["reward"]
    return rewards
