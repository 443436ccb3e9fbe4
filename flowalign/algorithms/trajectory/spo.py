"""SPO: preferences between the branches of one state, step by step (arXiv 2406.04314), and LPO's variant (2502.01051).

Rollout: a prompt has one stochastic trajectory. From each of its states, from `start` on, `group_size` next states are
drawn, and it goes on from one of them at random. Pairs: the best and the worst of those branches, judged by the picture
predicted at the next state, where the softmax of their two rewards is further apart than `threshold`. Loss: D3PO's, for
two steps from one state, which one network call serves.

LPO has the same loss with four branches, a larger beta, and a threshold that rises with the noise of the step.

Departures: no reward here knows of noise. SPO's authors judge by a PickScore that knows the timestep, LPO's by a U-Net
on noisy latents; here `judge` says how a branch is finished for the configured reward. The last branches are finished
by the ODE, and it is their rewards that the metrics show. SPO's recipe for SDXL goes on
with a branch for three more steps before it compares; here each step is compared.
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms.trajectory import step_pairs
from flowalign.algorithms.trajectory.base import WithStateValues, learned_steps
from flowalign.algorithms.trajectory.step_pairs import PairExperience, StepPairs
from flowalign.config import Config
from flowalign.data.batches import Batch
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import DiffusersPolicy, Rollout
from flowalign.rollouts.dense import Estimator, StateValues
from flowalign.rollouts.pictures import DiffusionSampler, SampledPictures
from flowalign.rollouts.processes import Processes
from samplers import step_std
from samplers.tree import side_branches

Gap = Annotated[float, Field(ge=0, lt=1)]


class SPOSettings(step_pairs.StepPairSettings):
    beta: float = Field(10.0, gt=0)
    """Factor of the log-ratios to the start weights, means over a sample's elements; published: 10, LPO 500."""
    threshold: Gap | tuple[Gap, Gap] = 0.3
    """Gap of a pair's rewards' softmax to exceed; two: at least and at most noise, else by standard deviation (LPO)."""
    start: int = Field(0, ge=0)
    """First step that branches, counted from 0; published: 4 of 20, LPO 0."""
    judge: Estimator = Estimator(kind="one_step")
    """Estimator that finishes a branch for the reward: `one_step` takes the predicted picture."""


class SPO(WithStateValues, StepPairs):
    """SPO: at every state the best of several next states is preferred to the worst (arXiv 2406.04314)."""

    name = "spo"
    Settings = SPOSettings
    settings: SPOSettings
    # whether a group can teach does not show in the rewards of its last branches
    combines = StepPairs.combines - {"refill", "whole", "served"}

    def __init__(self, settings: SPOSettings) -> None:
        super().__init__(settings)
        self.values = StateValues(settings.judge)

    def check(self, config: Config) -> None:
        super().check(config)
        steps = learned_steps(config)
        if self.settings.start > steps[-1]:
            raise ConfigError(
                f"algorithm.start: no step from {self.settings.start} on draws noise to branch by; at most {steps[-1]} "
                "works"
            )

    def items(self, config: Config) -> int:
        return sum(step >= self.settings.start for step in learned_steps(config))

    def rollout(self, sampler: DiffusionSampler, batch: Batch) -> tuple[Rollout, Batch]:
        firsts = [batch.group.index(g) for g in dict.fromkeys(batch.group)]
        members = len(batch) // len(firsts)
        trunk = sampler.rollout(batch[firsts])
        seeds = [batch.noise_seeds[first + 1 : first + members] for first in firsts]
        size = sampler.config.rollout.batch_size
        branches = side_branches(
            sampler.policy.at(trunk), trunk.trajectory, trunk.kernel, seeds, self.settings.start, size
        )
        samples = torch.arange(len(firsts), device=sampler.device).repeat_interleave(members)
        return trunk.branch(branches, samples), batch

    def step_reward(self, sampled: SampledPictures, processes: Processes) -> Tensor:
        return self.values(sampled, processes)[:, 1:]

    def threshold(self, rollout: Rollout) -> Tensor | float:
        if isinstance(self.settings.threshold, float):
            return self.settings.threshold
        sigmas = rollout.trajectory.sigmas
        std = step_std(rollout.kernel, sigmas, rollout.trajectory.eta.amax(0))
        # as of x = alpha * x0 + std * noise with alpha^2 + std^2 = 1, the scale of the authors' table
        std = std / torch.hypot(sigmas[1:], 1 - sigmas[1:])
        low, high = std[self.steps(rollout)].aminmax()
        least, most = self.settings.threshold
        return least + (most - least) * (std - low) / (high - low).clamp(min=1e-9)

    def steps(self, rollout: Rollout) -> Tensor:
        steps = super().steps(rollout)
        return steps[steps >= self.settings.start]

    def log_prob(self, policy: DiffusersPolicy, experience: PairExperience, samples: Tensor, steps: Tensor) -> Tensor:
        """[2 N] of the better steps, then the worse; a pair's left from one state of their group's trunk."""
        rollout, members = experience.rollout, experience.members
        starts = samples // members * members
        velocity = policy.velocity(rollout, starts.chunk(2)[0], steps.chunk(2)[0])
        velocity = torch.cat([velocity, velocity])
        return rollout.trajectory.score(rollout.kernel, velocity, samples, steps, starts).log_prob
