"""GDMD: distribution matching, each of whose targets weighs by the reward of where it leads (arXiv 2604.19009).

What the generator predicts at one of its steps is diffused to several levels, and each has a target of its own, the
prediction moved along the teacher's x0 - the fake's x0. The reward looks at the decoded *targets*, not at the sample,
and compares those of one sample: an advantage A of each, and r = 1/2 + A / (2 advantage_max) in [0, 1]. As in NFT, the
mixtures x+ = (1 - beta) x_old + beta x and x- = (1 + beta) x_old - beta x of the generator's predictions are drawn to
the target by r and 1 - r, which at x = x_old is the gradient of distribution matching times A / advantage_max. The
plain distance to the targets is added, so that no target pushes away: together 2 r times that gradient.

After the abstract, and others' summaries of the method: the authors' code is not public. The share of the plain
distance, the size of the step that is decoded and the scale of the advantages are chosen here. Departures: the targets
of an iteration are made before its updates, with one fake, where the authors also compare several of its states.
"""

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms.matching import base
from flowalign.algorithms.matching.distribution import (
    DistributionExperience,
    DistributionMatching,
    DistributionSettings,
)
from flowalign.config import Config, Named
from flowalign.core.groups import Scale, group_advantage
from flowalign.core.matching import optimality
from flowalign.core.record import Record
from flowalign.data.batches import Batch
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.settings import Role
from flowalign.rollouts.pictures import DiffusionSampler, SampledPictures
from flowalign.rollouts.processes import Processes


class GDMDSettings(DistributionSettings):
    levels: Named = Named(name="uniform", count=4, low=0.02, high=0.98)
    """Levels of a sample's targets, all of one step of the generator; `flowalign list levels`."""
    fake: Role = Role(updates=5)
    """Optimizer of the generator's own score."""
    beta: float = Field(1.0, gt=0)
    """Share of the new prediction in the mixtures."""
    scale: Scale = "batch"
    """Targets whose standard deviation of rewards advantages are divided by: a sample's ('group'), all, or none."""
    advantage_max: float = Field(1.0, gt=0)
    """The advantage that counts as entirely good."""
    distillation_weight: float = Field(1.0, ge=0)
    """Weight of the plain distance to the targets."""


@dataclass(kw_only=True)
class GDMDExperience(DistributionExperience):
    targets: Tensor | None = None
    """[B, L, ...] where distribution matching would move what the generator predicts."""
    target_weights: Tensor | None = None
    """[B, L] of their squared distances."""
    target_advantages: Tensor | None = None
    """[B, L] among the targets of a sample"""


class GDMD(DistributionMatching):
    """GDMD: distribution matching weighed by the rewards of its targets (arXiv 2604.19009)."""

    name = "gdmd"
    Settings = GDMDSettings
    settings: GDMDSettings
    experience_type = GDMDExperience

    def check(self, config: Config) -> None:
        super().check(config)
        if self.level_count(config) < 2:
            raise ConfigError("algorithm.levels: the targets of a sample are compared, so there are two or more")

    def steps(self, sampler: DiffusionSampler, batch: Batch) -> Tensor:
        """[B, L] one step of the generator for all the targets of an iteration."""
        return super().steps(sampler, batch)[:, :1].expand(-1, self.level_count(sampler.config))

    def experience(self, sampled: SampledPictures, record: Record, processes: Processes) -> base.MatchingExperience:
        experience = super().experience(sampled, record, processes)
        assert isinstance(experience, GDMDExperience)
        sampler, batch = sampled.sampler, experience.batch
        chunks = experience.items.split(sampler.config.training.micro_batch_size)
        pieces = [self._targets(sampler.policy, experience, items) for items in chunks]
        targets, weights = (torch.cat(each).unflatten(0, (len(batch), -1)) for each in zip(*pieces, strict=True))
        rollout, rewards = sampled.rollout, []
        for number in range(targets.shape[1]):
            whole = rollout.whole(targets[:, number])
            pictures = sampler.policy.finished(whole, sampler.config.rollout.batch_size, sampler.needs)
            scores = sampled.scorer.score(pictures, batch, steps=[number] * len(batch))
            value = scores.value if scores.missing is None else scores.value.masked_fill(scores.missing, torch.nan)
            rewards.append(value.to(processes.device))
        reward = processes.gather(torch.stack(rewards, 1))
        owner = torch.arange(len(reward), device=reward.device).repeat_interleave(reward.shape[1])
        advantage = group_advantage(reward.flatten(), owner, self.settings.scale).nan_to_num(0).view_as(reward)
        experience.targets, experience.target_weights = targets, weights
        experience.target_advantages = processes.own(advantage, len(batch))
        experience.metrics["gdmd/target_reward"] = reward.nanmean().item()
        return experience

    def _targets(self, policy: DiffusersPolicy, experience: GDMDExperience, items: Tensor) -> tuple[Tensor, Tensor]:
        """[N, ...] targets of these items, and [N] weights: one over the mean distance from the teacher's x0."""
        state = experience.states(items)
        noised = self.diffused(experience, items, state, state.x0)
        fake, teacher = self.asked(policy, experience, noised)
        distance = (state.x0 - teacher).abs().flatten(1).mean(1).clamp(min=1e-5)
        return state.x0 + teacher - fake, 1 / distance

    def losses(
        self, policy: DiffusersPolicy, experience: base.MatchingExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(experience, GDMDExperience) and experience.generator is not None
        assert experience.targets is not None
        assert experience.target_weights is not None and experience.target_advantages is not None
        state, at = experience.states(items), (experience.members(items), experience.places(items))
        x0 = state.clean(policy.velocity_of(experience.generator, state).float())
        loss, good = guided(x0, state.x0, experience.targets[at], experience.target_advantages[at], self.settings)
        return experience.target_weights[at] * loss, {"gdmd/goodness": good}


def guided(x0: Tensor, old: Tensor, target: Tensor, advantage: Tensor, settings: GDMDSettings) -> tuple[Tensor, Tensor]:
    """[N] losses of predictions x0 [N, ...] by targets and their advantages [N], and [N] how good targets are.

    Args:
        old: [N, ...] the predictions that the targets were made from.
    """

    def off(prediction: Tensor) -> Tensor:
        return (target - prediction).square().flatten(1).mean(1)

    good, beta = optimality(advantage, settings.advantage_max), settings.beta
    moved = beta * (x0 - old)
    loss = (good * off(old + moved) + (1 - good) * off(old - moved)) / beta
    return loss + settings.distillation_weight * off(x0), good
