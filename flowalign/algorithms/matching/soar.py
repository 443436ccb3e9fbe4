"""SOAR: fine-tuning that also learns the way back from the model's own mistakes (arXiv 2604.12617).

Beside the model's own objective at x = (1 - s) x0 + s n, one step of the guided ODE by the current weights leads from s
to s1, to where sampling would be. From there the same noise n leads up again, to points at levels s' between s1 and 1:
x' = (1 - a) x1 + a n, a = (s' - s1) / (1 - s1). They are off the straight line by what the step got wrong, and the
velocity to learn there leads to the picture all the same: (x' - x0) / s'.

Departure: s' is uniform before the pipeline's shift, and not after it.
"""

import torch
from pydantic import Field
from torch import Generator, Tensor

from flowalign.algorithms.matching import base
from flowalign.algorithms.matching.files import FileSettings, SampledFiles
from flowalign.algorithms.matching.levels import EDGE
from flowalign.algorithms.matching.targets import TargetMatching
from flowalign.config import Config, Named
from flowalign.data.batches import Batch
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.rollouts.pictures import DiffusionSampler
from flowalign.rollouts.processes import Processes
from samplers import derive_seed


class SOARSettings(FileSettings):
    levels: Named = Named(name="logit_normal")
    """Levels of the first points: uniform or logit_normal; their number is `training.group_size`."""
    points: int = Field(6, ge=1)
    """Number of points off the line, for each one on it; published: 6."""
    points_weight: float = Field(1.0, gt=0)
    """Weight of each such point's error; published: 1."""
    step: float = Field(1 / 40, gt=0, lt=1)
    """Length of the step, in noise levels before the pipeline's shift; published: one of 40."""
    step_guidance: float = Field(4.5, ge=1)
    """Classifier-free scale of the step; published: 4.5."""


class SOAR(TargetMatching):
    """SOAR: fine-tuning on pictures, and the way back from the model's own mistakes (arXiv 2604.12617)."""

    name = "soar"
    Settings = SOARSettings
    settings: SOARSettings

    def check(self, config: Config) -> None:
        super().check(config)
        if self.settings.levels.name == "schedule":
            raise ConfigError("algorithm.levels: a step from a point of the schedule leads to none; uniform works")

    def items(self, config: Config) -> int:
        return super().items(config) * (1 + self.settings.points)

    def drawn_levels(self, sampler: DiffusionSampler, batch: Batch) -> Tensor:
        """[B, 2 + points] of every row s, s1 and the levels of its points."""
        first = super().drawn_levels(sampler, batch)
        second = (first - self.settings.step).clamp(min=EDGE)
        generators = [Generator().manual_seed(derive_seed(seed, 8)) for seed in batch.noise_seeds]
        shares = torch.stack([torch.rand(self.settings.points, generator=generator) for generator in generators])
        return torch.cat([first, second, second + shares.clamp(min=EDGE) * (1 - second)], 1)

    def lessons(self, sampled: SampledFiles, processes: Processes) -> base.MatchingExperience:
        experience = super().lessons(sampled, processes)
        sampler, batch = sampled.sampler, sampled.batch
        whole, clean, level_index = self.prompted(batch), experience.clean, experience.level_index
        guided, _ = self.at_levels(
            sampler, whole, clean.x0, self.drawn_levels(sampler, whole), self.settings.step_guidance
        )
        noise = []
        for rows in torch.arange(len(batch), device=processes.device).split(sampler.config.rollout.batch_size):
            noised = experience.noised(torch.stack([rows, rows * 0], 1))
            with torch.no_grad():
                velocity = sampler.policy.velocity_of(guided, noised).float()
            noises = [noised.noise]
            for level in level_index[rows, 2:].unbind(1):
                sigmas = (clean.sigmas[k] for k in (level_index[rows, 0], level_index[rows, 1], level))
                x = off_line(noised.x, noised.noise, velocity, *sigmas)
                noises.append(clean.noise_of(rows, level, x))
            noise.append(torch.stack(noises, 1))
        experience.noise = torch.cat(noise)
        experience.level_index = torch.cat([level_index[:, :1], level_index[:, 2:]], 1)
        experience.items = self.item_numbers(batch, 1 + self.settings.points, processes.device)
        return experience

    def losses(
        self, policy: DiffusersPolicy, experience: base.MatchingExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, values = super().losses(policy, experience, items)
        points, weight = self.settings.points, self.settings.points_weight
        return loss * torch.where(items[:, 1] == 0, 1, weight) * (1 + points) / (1 + weight * points), values

    def loss(self, points: base.Points) -> tuple[Tensor, dict[str, Tensor]]:
        return points.error, {}


def off_line(x: Tensor, noise: Tensor, velocity: Tensor, sigma: Tensor, sigma_to: Tensor, sigma_back: Tensor) -> Tensor:
    """[N, ...] states at `sigma_back`, a step away from x at `sigma` and up again from `sigma_to` by the same noise.

    Args:
        x, noise, velocity: [N, ...].
        sigma, sigma_to, sigma_back: [N], sigma_to < sigma and sigma_to <= sigma_back < 1.
    """
    sigma, sigma_to, sigma_back = (s.view(-1, *[1] * (x.dim() - 1)) for s in (sigma, sigma_to, sigma_back))
    stepped = x + (sigma_to - sigma) * velocity
    back = (sigma_back - sigma_to) / (1 - sigma_to)
    return (1 - back) * stepped + back * noise
