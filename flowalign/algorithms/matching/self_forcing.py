"""Self-Forcing: a causal video model learns on its own chunks, and with rewards (arXiv 2506.08009 and 2512.04678).

A video is made chunk by chunk, each given the model's own clean ones before it. Of an iteration's samples one step of
the schedule, drawn at random, is the last: there each chunk goes straight to the x0 that it predicts, which is what the
next ones are given. That prediction alone has a gradient, and what it is given has none. Distribution matching then
asks two scores about the finished video, all of whose frames see each other: the teacher, the start weights, and
`fake`, which learns what the model makes. Reward-Forcing multiplies a sample's loss by exp(beta * reward).

Authors' code (guandeh17/Self-Forcing, model/dmd.py; Reward-Forcing's model/re_dmd.py): 4 steps that put fresh noise on
each prediction (`rollout.kernel: cps`, `eta: 1`), 5 updates of the fake, a teacher under guidance 4 (3 in their code,
which adds it to 1). Departures: the teacher and the fake are the model itself, made as a whole, where theirs are other
models of the family (Wan 14B and 1.3B); their loss is half of this one; a reward has the run's scale, where theirs is
normalised by VideoAlign.
"""

from dataclasses import replace

import torch
from pydantic import Field
from torch import Generator, Tensor

from flowalign.algorithms.matching import base
from flowalign.algorithms.matching.distribution import (
    DistributionExperience,
    DistributionMatching,
    DistributionSettings,
)
from flowalign.algorithms.matching.online import OnlineMatching
from flowalign.config import Config, Named
from flowalign.core.record import Record
from flowalign.data.batches import Batch
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import DiffusersPolicy, Rollout
from flowalign.policies.settings import Role
from flowalign.rollouts.pictures import DiffusionSampler, SampledPictures
from flowalign.rollouts.processes import Processes
from samplers import derive_seed


class SelfForcingSettings(DistributionSettings):
    stochastic: bool = True
    levels: Named = Named(name="uniform", count=1, low=0.02, high=0.98)
    """Levels to diffuse the finished video to; `flowalign list levels`."""
    reference_guidance: float | None = Field(4.0, ge=1)
    """Classifier-free scale of the teacher; published: 4, which the authors' code calls 3."""
    fake: Role = Role(updates=5)
    """Optimizer of the generator's own score; published: a fifth of the generator's rate."""
    beta: float = Field(0.0, ge=0)
    """Strength of the reward in a sample's weight exp(beta * reward); 0: Self-Forcing, without rewards."""


class SelfForcing(DistributionMatching):
    """Self-Forcing, with Reward-Forcing's weights: a causal video model on its own rollouts (arXiv 2506.08009)."""

    name = "self_forcing"
    Settings = SelfForcingSettings
    settings: SelfForcingSettings
    combines = (DistributionMatching.combines | {"chunks"}) - {"served"}

    def check(self, config: Config) -> None:
        super().check(config)
        if config.rollout.chunks == 1:
            raise ConfigError("rollout.chunks: self_forcing learns from videos made chunk by chunk; 2 or more works")

    def sampled(self, sampler: DiffusionSampler, batch: Batch) -> Rollout:
        seed = derive_seed(sampler.config.training.seed, batch.iteration, 7)
        until = int(torch.randint(sampler.config.rollout.steps, (), generator=Generator().manual_seed(seed)))
        eta = None if self.settings.stochastic else torch.zeros(sampler.config.rollout.steps)
        return sampler.rollout(batch, eta, until=until)

    def credit(self, record: Record) -> Tensor:
        """[B] weight of each sample's loss; 1 where no reward applied to it.

        Raises:
            ConfigError: a weight is larger than float32 can hold.
        """
        weight = (self.settings.beta * record.reward).exp()
        if weight.isinf().any():
            largest = float(record.reward.nan_to_num(-torch.inf).max())
            raise ConfigError(
                f"algorithm.beta: exp({self.settings.beta:g} * {largest:g}) is no number; a smaller beta, or the "
                "reward `rescaled`, works"
            )
        return weight.nan_to_num(1.0)

    def experience(self, sampled: SampledPictures, record: Record, processes: Processes) -> base.MatchingExperience:
        # without the conditions of a generator's states as a whole
        return OnlineMatching.experience(self, sampled, record, processes)

    def role_losses(
        self, role: str, policy: DiffusersPolicy, experience: base.MatchingExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        noised = experience.noised(items)
        error = noised.error(policy.velocity_of(experience.clean, noised).float())
        return base.by_item(error, items), {"fake/error": base.by_item(error, items)}

    def losses(
        self, policy: DiffusersPolicy, experience: base.MatchingExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(experience, DistributionExperience) and experience.rollout is not None
        samples = experience.members(items)
        x0, weight = finished(policy, experience.rollout, samples), experience.advantage[samples]
        noised = replace(experience.noised(items), x0=x0.detach())
        loss, values = self.distilled(policy, experience, noised, x0)
        return weight * loss, values | {"self_forcing/weight": weight}


def finished(policy: DiffusersPolicy, rollout: Rollout, samples: Tensor) -> Tensor:
    """[N, C, F, H, W] videos of these samples [N], with the gradient of each chunk's last step."""
    trajectory = rollout.trajectory
    chunks, length = trajectory.chunks, len(trajectory.sigmas) - 1
    last = torch.arange(chunks, device=samples.device).add(1).mul(length).sub(1)
    rows, steps = samples.repeat_interleave(chunks), last.repeat(len(samples))
    x = trajectory.part(trajectory.latents[rows, steps], steps)
    x0 = x - trajectory.sigmas[-2] * policy.velocity(rollout, rows, steps).float()
    # chunk after chunk along the frames
    return torch.cat(x0.unflatten(0, (-1, chunks)).unbind(1), 2)
