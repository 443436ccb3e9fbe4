"""RTDMD: a few-step generator is matched to its teacher tilted by a reward (arXiv 2605.26108).

The divergence from the tilted teacher is that from the teacher less the mean reward. Of the generator's steps with
noise (CPS) some are drawn each iteration, and learn as in Flow-GRPO. The last step has no noise: there the reward
itself is differentiated, relu(margin - r), beside DMD's loss. `fake` learns what the last step predicts, and is to
agree with itself: two independent short noisy steps down from where it is asked change its x0 by d1 and d2, and the
mean of their product, an estimate of the squared mean change, is in its loss.

Authors' code (Harahan/RTDMD, rtdmd/trainers): the numbers of its RL stage are the defaults. Its loss is a sample's mean
over the steps that it learns from, and so is this one. Departures: at steps that are not drawn the members of a group
have noises of their own, where theirs have one; levels are drawn, and steps down taken, before the pipeline's shift.
The cold start (AC-DMD at all steps) is not here; `dmd2` and `tdm` make one.
"""

from dataclasses import dataclass, replace

import torch
from pydantic import Field
from torch import Generator, Tensor

from flowalign.algorithms.matching import base
from flowalign.algorithms.matching.distribution import DistributionSettings
from flowalign.algorithms.matching.rewarded import RewardedExperience, RewardedMatching
from flowalign.config import Config, Named
from flowalign.core.losses import clipped_policy_loss
from flowalign.core.record import Record
from flowalign.data.batches import Batch
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import CleanSamples, DiffusersPolicy, Noised
from flowalign.policies.settings import Role
from flowalign.rollouts.pictures import DiffusionSampler, SampledPictures
from flowalign.rollouts.processes import Processes
from samplers import derive_seed, transition
from samplers.kernels import cps
from samplers.noise import generators, normal

SHORT = 0.2
"""Largest change of the level, before the pipeline's shift, over which `fake` is to agree with itself."""


class RTDMDSettings(DistributionSettings):
    stochastic: bool = True
    levels: Named = Named(name="uniform", count=1, low=0.02, high=0.98)
    """Levels to diffuse the last step's prediction to; `flowalign list levels`."""
    fake: Role = Role()
    """Optimizer of the generator's own score; published: ten times the generator's rate."""
    advantage: Named = Named(name="grpo", scale="batch", clip=5.0)
    """Name in `flowalign list advantages`, with its settings."""
    clip_range: float = Field(1e-5, gt=0)
    """PPO's, for log-probabilities of `rollout.kernel: cps_published`."""
    learned_steps: int = Field(2, ge=1)
    """Number of stochastic steps that an iteration learns from, drawn at random; published: 2 of 3."""
    distillation_weight: float = Field(1e-3, ge=0)
    """Weight of distribution matching, half the squared distance."""
    reward_weight: float = Field(1e-4, ge=0)
    """Weight of the reward at the last step; 0: a reward without gradient works."""
    margin: float = 3.0
    """Reward from which on a sample has no gradient there."""
    consistency_weight: float = Field(0.01, ge=0)
    """Weight of the fake's agreement with itself."""


@dataclass(kw_only=True)
class RTDMDExperience(RewardedExperience):
    acting: tuple[int, ...] = ()
    """The stochastic steps to learn from."""
    lower: CleanSamples | None = None
    """Conditions of `fake` a short step below the levels."""
    lower_index: Tensor | None = None
    """[B, L] the numbers of those levels"""


class RTDMD(RewardedMatching):
    """RTDMD: GRPO on stochastic steps, distribution matching and the reward on the last one (arXiv 2605.26108)."""

    name = "rtdmd"
    Settings = RTDMDSettings
    settings: RTDMDSettings
    experience_type = RTDMDExperience
    combines = RewardedMatching.combines | {"refill"}

    def __init__(self, settings: RTDMDSettings) -> None:
        super().__init__(settings)
        self.advantage_of = settings.advantage.part("advantages", "algorithm.advantage")

    @property
    def needs_gradient(self) -> bool:
        return self.settings.reward_weight > 0

    def check(self, config: Config) -> None:
        super().check(config)
        stochastic = config.noise()[1].nonzero().flatten().tolist() if self.settings.stochastic else []
        if len(stochastic) < self.settings.learned_steps or config.rollout.steps - 1 in stochastic:
            raise ConfigError(
                f"algorithm.learned_steps: {self.settings.learned_steps} stochastic steps and a last one without noise "
                f"are learned from, and of {config.rollout.steps} the steps {stochastic} have noise; kernel: "
                "cps_published with plan: all works"
            )
        if not self.draw_levels(config.rollout.steps, Generator()).is_floating_point():
            raise ConfigError("algorithm.levels: fake steps down from levels between 0 and 1; uniform works")

    def credit(self, record: Record) -> Tensor:
        advantage: Tensor = self.advantage_of(record)
        return advantage if record.confidence is None else advantage * record.confidence

    def steps(self, sampler: DiffusionSampler, batch: Batch) -> Tensor:
        """[B, L] the last step."""
        return torch.full((len(batch), self.level_count(sampler.config)), sampler.config.rollout.steps - 1)

    def experience(self, sampled: SampledPictures, record: Record, processes: Processes) -> base.MatchingExperience:
        experience = super().experience(sampled, record, processes)
        assert isinstance(experience, RTDMDExperience)
        sampler, batch = sampled.sampler, experience.batch
        rng = Generator().manual_seed(derive_seed(sampler.config.training.seed, batch.iteration, 15))
        stochastic = sampled.rollout.mask.any(0).nonzero().flatten().tolist()
        chosen = torch.randperm(len(stochastic), generator=rng)[: self.settings.learned_steps]
        experience.acting = tuple(sorted(stochastic[i] for i in chosen.tolist()))
        drawn = self.drawn_levels(sampler, batch)
        drawn = (drawn - SHORT * torch.rand(drawn.shape[1], generator=rng)).clamp(min=1e-3)
        guidance = experience.clean.guidance
        experience.lower, experience.lower_index = self.at_levels(sampler, batch, experience.clean.x0, drawn, guidance)
        return experience

    def redrawn(self, experience: base.MatchingExperience, number: int) -> base.MatchingExperience:
        assert isinstance(experience, RTDMDExperience) and experience.lower_index is not None
        # the levels below go with the levels
        both = torch.cat([experience.level_index, experience.lower_index], 1)
        drawn = super().redrawn(replace(experience, level_index=both), number)
        level_index, lower_index = drawn.level_index.chunk(2, 1)
        assert isinstance(drawn, RTDMDExperience)
        return replace(drawn, level_index=level_index, lower_index=lower_index)

    def role_losses(
        self, role: str, policy: DiffusersPolicy, experience: base.MatchingExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(experience, RTDMDExperience)
        state = experience.states(items)
        noised = self.diffused(experience, items, state, state.x0)
        velocity = policy.velocity_of(experience.clean, noised).float()
        error = noised.error(velocity)
        loss = (10 * noised.sigma**2).clamp(max=1) * error
        values = {"fake/error": error}
        if self.settings.consistency_weight:
            values["fake/inconsistency"] = self.inconsistency(policy, experience, items, noised, velocity)
            loss = loss + self.settings.consistency_weight * values["fake/inconsistency"]
        return loss, values

    def inconsistency(
        self, policy: DiffusersPolicy, experience: RTDMDExperience, items: Tensor, noised: Noised, velocity: Tensor
    ) -> Tensor:
        """[N] products of two changes of the current weights' x0 from noised samples to a little less noise."""
        assert experience.lower is not None and experience.lower_index is not None and experience.rollout is not None
        samples, places = noised.samples, experience.places(items)
        eta = experience.rollout.trajectory.eta[samples].amax(1)
        at = experience.lower.noised_by(samples, experience.lower_index[samples, places], noised.noise)
        x0, changes = noised.clean(velocity), []
        for draw in range(2):
            pairs = zip(samples.tolist(), places.tolist(), strict=True)
            seeds = [derive_seed(experience.noise_seeds[sample], place, 16, draw) for sample, place in pairs]
            noise = normal(x0.shape[1:], generators(seeds), x0.device)
            x = transition(cps, noised.x, velocity.detach(), noised.sigma, at.sigma, eta, noise=noise).next
            changes.append(x - at.s * policy.velocity_of(experience.lower, at, x).float() - x0)
        return (changes[0] * changes[1]).flatten(1).mean(1)

    def losses(
        self, policy: DiffusersPolicy, experience: base.MatchingExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(experience, RTDMDExperience) and experience.rollout is not None
        settings, rollout, trajectory = self.settings, experience.rollout, experience.rollout.trajectory
        state, count = experience.states(items), len(experience.acting)
        samples = state.samples.repeat(count + 1)
        steps = torch.tensor([*experience.acting, len(trajectory.sigmas) - 2], device=items.device)
        steps = steps.repeat_interleave(len(items))
        velocity = policy.velocity(rollout, samples, steps).float()
        acting = slice(count * len(items))
        at = samples[acting], steps[acting]
        log_prob = trajectory.score(rollout.kernel, velocity[acting], *at).log_prob
        advantage, clip = experience.advantage[at[0]], settings.clip_range
        acted = clipped_policy_loss(log_prob, trajectory.log_prob[at], advantage, clip, clip).view(count, -1)
        x0 = state.clean(velocity[count * len(items) :])
        noised = self.diffused(experience, items, state, x0.detach())
        matched, values = self.distilled(policy, experience, noised, x0)
        loss = acted.sum(0) + settings.distillation_weight / 2 * matched
        if settings.reward_weight:
            value = experience.value(policy, x0, state.samples)
            loss = loss + settings.reward_weight * (settings.margin - value).relu()
            values["rtdmd/last_reward"] = value
        return loss / (count + 1), values | {"rtdmd/policy_loss": acted.mean(0)}
