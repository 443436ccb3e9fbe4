"""Distribution matching that also asks a reward for its gradient, at what a network predicts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flowalign.algorithms.direct.differentiable import check_made, check_named
from flowalign.algorithms.matching import base
from flowalign.algorithms.matching.distribution import DistributionExperience, DistributionMatching
from flowalign.config import Config
from flowalign.core.record import Record
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.rollouts.pictures import SampledPictures
from flowalign.rollouts.processes import Processes
from rewards import DifferentiableReward, Reward, spec_of
from rewards.gradients import score_with_gradient


@dataclass(kw_only=True)
class RewardedExperience(DistributionExperience):
    differentiable: DifferentiableReward | None = None
    metadata: Sequence[Mapping[str, Any]] = field(default_factory=list)
    """[B] metadata of the samples, for the reward."""

    def value(self, policy: DiffusersPolicy, latents: Tensor, samples: Tensor) -> Tensor:
        """[N] the reward of finished latents [N, ...] of these samples [N], with gradients."""
        assert self.rollout is not None and self.differentiable is not None
        whole, rows = self.rollout.whole(latents, samples), samples.tolist()
        of_latents = "latents" in spec_of(self.differentiable).needs
        made = policy.latents_of(whole) if of_latents else policy.decode_pixels(whole)
        prompts, metadata = [self.rollout.prompts[i] for i in rows], [self.metadata[i] for i in rows]
        return score_with_gradient(self.differentiable, made, prompts, metadata).value


class RewardedMatching(DistributionMatching):
    """Base of the methods that need the gradient."""

    experience_type = RewardedExperience

    @property
    def needs_gradient(self) -> bool:
        """Whether the settings ask for the reward's gradient."""
        return True

    def check(self, config: Config) -> None:
        super().check(config)
        if self.needs_gradient:
            check_named(config.rewards)

    def check_reward(self, reward: Reward, config: Config) -> None:
        super().check_reward(reward, config)
        if not self.needs_gradient:
            return
        check_made(reward)
        if spec_of(reward).kind in ("set", "group"):
            raise ConfigError(f"rewards: '{reward.name}' looks at several samples, and its gradient is asked of one")

    def experience(self, sampled: SampledPictures, record: Record, processes: Processes) -> base.MatchingExperience:
        experience = super().experience(sampled, record, processes)
        assert isinstance(experience, RewardedExperience)
        experience.differentiable = sampled.scorer.reward  # type: ignore[assignment]
        experience.metadata = sampled.scorer.metadata(sampled.batch, range(len(sampled.batch)))
        return experience
