"""G2RPO: one perturbed step at a time, judged at several granularities (Granular-GRPO, arXiv 2510.01982).

Rollout: each prompt has one deterministic trajectory; at each early step the group leaves it by one stochastic step
and finishes by the ODE. Credit: the reward belongs to that step alone, normalised among the members that left at the
same state, once for every granularity (the full schedule, every second of its steps, ...), and the advantages
are summed: granularities are rewards of their own, and the advantage is `per_reward`. Loss: PPO's clip on the one step.

Departure: the released code takes an optimizer step after each branching step; here the actions of all of them
mix in `updates_per_iteration` updates.
"""

from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms.trajectory import base as trajectory
from flowalign.algorithms.trajectory.base import TrajectoryAlgorithm
from flowalign.algorithms.trajectory.branching import SINGLE, branch_everywhere, places
from flowalign.config import Config, Named
from flowalign.core.record import Record
from flowalign.data.batches import Batch
from flowalign.policies.diffusion import Rollout
from flowalign.rollouts.pictures import DiffusionSampler, SampledPictures
from flowalign.rollouts.processes import Processes


class G2RPOSettings(trajectory.PolicySettings):
    advantage: Named = Named(name="per_reward", clip=5.0, unbiased=True, eps=1e-8)
    strides: list[int] = Field([1, 2], min_length=1)
    """Granularities: each finishes a branch by a step and then every stride-th of the schedule; the first must be 1."""


class G2RPO(TrajectoryAlgorithm):
    """G2RPO: branches of one stochastic step, advantages summed over granularities (arXiv 2510.01982)."""

    name = "g2rpo"
    Settings = G2RPOSettings
    settings: G2RPOSettings
    combines = TrajectoryAlgorithm.combines - {"whole", "served"}
    plan = SINGLE

    def branches(self, config: Config) -> int:
        return len(places(config))

    def rollout(self, sampler: DiffusionSampler, batch: Batch) -> tuple[Rollout, Batch]:
        return branch_everywhere(sampler, batch)

    def step_reward(self, sampled: SampledPictures, processes: Processes) -> Tensor:
        """[B, L] the reward at each granularity; `credit` spreads it to the branching step."""
        rollout, sampler, rewards = sampled.rollout, sampled.sampler, [sampled.scores.value]
        rows, steps = rollout.trajectory.mask.nonzero().unbind(1)
        for stride in self.settings.strides[1:]:
            finished = sampler.finish(rollout, rows, steps + 1, stride)
            images = sampler.policy.decode_latents(rollout.whole(finished, rows), sampler.config.rollout.batch_size)
            rewards.append(sampled.scorer.score(images, sampled.batch).value)
            everywhere = processes.gather(rewards[-1].to(processes.device))
            sampled.metrics[f"reward/stride/{stride}"] = everywhere.mean().item()
        return torch.stack(rewards, 1)

    def credit(self, record: Record) -> Tensor:
        rewards = record.reward.T
        weights = torch.ones_like(rewards[:, 0])
        return super().credit(replace(record, reward=rewards.mean(0), rewards=rewards, reward_weights=weights))
