"""PRDP: predict the difference of two rewards from the trajectories' log-ratios (arXiv 2402.08714), after the abstract.

The abstract says: a regression of the reward difference of two pictures on their denoising trajectories, whose solution
maximises the reward as reinforcement learning would, trained online with proximal updates. Assumed here:

- a prediction is beta times the difference of the two trajectories' summed log-ratios to the start weights, from the
  closed form of the KL-regularised optimum, and the regression is a squared error;
- proximal is PPO's pessimism: each step's log-ratio is clamped around the sampling weights' own, and the loss is
  the larger of the errors with and without the clamp;
- pairs are neighbours in a group: every picture is in one.

A pair is learned from in one piece, all steps of both trajectories: `micro_batch_size: 1` is two trajectories' memory.
"""

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms.trajectory import step_pairs
from flowalign.algorithms.trajectory.step_pairs import PairExperience, StepPairs
from flowalign.config import Config
from flowalign.core.step_losses import reward_difference_loss
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import DiffusersPolicy, Rollout


class PRDPSettings(step_pairs.StepPairSettings):
    beta: float = Field(10.0, gt=0)
    """Reward per unit of a trajectory's log-ratio, a sum over steps of means over elements; the weight of the KL in
    nats is this divided by the number of elements."""
    clip_range: float = Field(1e-2, gt=0, lt=1)
    """Largest distance of a step's log-ratio from the sampling weights' own."""


class PRDP(StepPairs):
    """PRDP, after its abstract: regress reward differences from the log-ratios of trajectories (arXiv 2402.08714)."""

    name = "prdp"
    Settings = PRDPSettings
    settings: PRDPSettings
    unit = "pairs"
    ties_teach = True

    def check(self, config: Config) -> None:
        super().check(config)
        if config.training.group_size % 2:
            raise ConfigError(
                f"training.group_size: prdp compares the samples of a group two by two; "
                f"{config.training.group_size + 1} works, {config.training.group_size} leaves one over"
            )

    def items(self, config: Config) -> int:
        return config.training.group_size // 2

    def compared(self, reward: Tensor, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Neighbours: [G, M / 2, 2] items, and [G, M, T] by how much each has the larger reward of its pair."""
        groups, members, steps = reward.shape
        items = torch.arange(groups * members, device=reward.device).view(groups, -1, 2)
        pairs = reward.view(groups, -1, 2, steps)
        return items, (pairs - pairs.flip(2)).view(reward.shape)

    def losses(
        self, policy: DiffusersPolicy, experience: PairExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        trajectory, steps = experience.rollout.trajectory, experience.steps
        samples, at = items.flatten().repeat_interleave(len(steps)), steps.repeat(items.numel())
        shape = (*items.shape, len(steps))
        log_prob, reference = self.log_probs(policy, experience, samples, at)
        old = trajectory.log_prob[samples, at]
        log_ratio, old_log_ratio = (log_prob - reference).view(shape), (old - reference).view(shape)
        reward = experience.reward[items, 0]
        beta, clip_range = self.settings.beta, self.settings.clip_range
        predicted = beta * log_ratio.detach().sum(2).diff(dim=1)[:, 0]
        return reward_difference_loss(reward, log_ratio, old_log_ratio, beta, clip_range), {
            "preference/accuracy": (predicted * reward.diff(dim=1)[:, 0]).sign() / 2 + 0.5,
            "policy/ratio": log_ratio.detach().exp().flatten(1).mean(1),
            "policy/clip_fraction": ((log_ratio - old_log_ratio).abs() > clip_range).float().flatten(1).mean(1),
        }
