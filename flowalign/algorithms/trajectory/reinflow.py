"""ReinFlow: flows with learned noise, exact likelihood at few steps or one (arXiv 2505.22094).

Rollout: each step adds Gaussian noise whose size a small network, trained with the policy, decides from the noise
level and the prompt; its upper bound is lowered late in training. Credit is group-relative. Loss: PPO's clip
on the exact density of each step, minus an entropy bonus that keeps the noise from vanishing.

Departure: the likelihood ratio is taken a step, not a chain, and there is no critic: advantages come from the group,
as for the other algorithms here.
"""

from collections.abc import Mapping, Sequence

from pydantic import Field
from torch import Tensor, nn

from flowalign.algorithms.policy_gradient import ActionExperience
from flowalign.algorithms.trajectory import base as trajectory
from flowalign.algorithms.trajectory.base import Steps, TrajectoryAlgorithm
from flowalign.core.divergences import gaussian_entropy
from flowalign.data.batches import Batch
from flowalign.policies.diffusion import DiffusersPolicy, Rollout
from flowalign.rollouts.pictures import DiffusionSampler
from samplers.kernels import Kernel
from samplers.learned import LearnedNoise


class ReinFlowSettings(trajectory.PolicySettings):
    noise_low: float = Field(0.03, gt=0)
    noise_high: float = Field(0.15, gt=0)
    """Bounds of the standard deviation the network may choose."""
    entropy_weight: float = Field(0.0, ge=0)


class ReinFlow(TrajectoryAlgorithm):
    """ReinFlow: the noise of each step is learned with the policy (arXiv 2505.22094)."""

    name = "reinflow"
    Settings = ReinFlowSettings
    settings: ReinFlowSettings
    noise = "own"
    # the kernel of a rollout is the network that learns
    combines = TrajectoryAlgorithm.combines - {"workers", "whole", "served"}
    network: LearnedNoise

    def modules(self, policy: DiffusersPolicy) -> Mapping[str, nn.Module]:
        s = self.settings
        size = policy.prompt_vectors([""]).shape[1]
        shape = (policy.latent_channels, 1, 1)
        self.network = LearnedNoise(shape, s.noise_low, s.noise_high, size).to(policy.device)
        return {"noise": self.network}

    def progress(self, done: float) -> None:
        self.network.anneal(done)

    def rollout(self, sampler: DiffusionSampler, batch: Batch) -> tuple[Rollout, Batch]:
        # the kernel knows the prompts of one network batch
        size = sampler.config.rollout.batch_size
        rollouts = []
        for i in range(0, len(batch), size):
            chunk = batch[range(i, min(i + size, len(batch)))]
            rollouts.append(sampler.rollout(chunk, kernel=self._kernel(sampler.policy, chunk.prompts)))
        return Rollout.cat(rollouts), batch

    def _kernel(self, policy: DiffusersPolicy, prompts: Sequence[str]) -> Kernel:
        return self.network.kernel(policy.prompt_vectors(prompts).to(policy.device))

    def actions(self, policy: DiffusersPolicy, experience: ActionExperience, items: Tensor) -> Steps:
        samples = items[:, 0].tolist()
        experience.rollout.kernel = self._kernel(policy, [experience.batch.prompts[i] for i in samples])
        return super().actions(policy, experience, items)

    def loss(self, actions: Steps) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = super().loss(actions)
        std = actions.transition.std
        entropy = gaussian_entropy(std)
        metrics |= {"policy/entropy": entropy, "policy/noise": std.flatten(1).mean(1)}
        return loss - self.settings.entropy_weight * entropy, metrics
