"""Flash-GRPO: one stochastic step a prompt, and policy losses without the step's scale (arXiv 2605.15980).

Rollout: one step has noise, drawn for each prompt by itself (`plan: {..., of: group}`), so that members of a group are
compared at the same step while an iteration covers many. Loss: the gradient of a step's log-probability in the velocity
is proportional to |d mean / d v| / std; each action's policy loss is divided by it, over the mean quotient of the
iteration's actions, which keeps the size of the whole. The divergence is not weighted. Published (Wan 2.1, 1.3B): the
first 10 of 20 steps, kernel `linear_sde`, clip 1e-3, rate 1e-4, no KL, deviations of the whole batch.

Departure: the mean is of all actions of an iteration; the authors' is of one micro-batch of all processes.
"""

import torch

from flowalign.algorithms.policy_gradient import ActionExperience
from flowalign.algorithms.trajectory.base import TrajectoryAlgorithm
from flowalign.core.record import Record
from flowalign.rollouts.pictures import SampledPictures
from flowalign.rollouts.processes import Processes
from samplers import Random, Window, step_sensitivity


class FlashGRPO(TrajectoryAlgorithm):
    """Flash-GRPO: one stochastic step a prompt, gradients of all steps at one scale (arXiv 2605.15980)."""

    name = "flash_grpo"
    plan = (Window | Random, "{name: window, size: 1, order: random, of: group}")

    def experience(self, sampled: SampledPictures, record: Record, processes: Processes) -> ActionExperience:
        experience = super().experience(sampled, record, processes)
        trajectory, mask = sampled.rollout.trajectory, sampled.rollout.mask
        weight = (1 / step_sensitivity(sampled.rollout.kernel, trajectory.sigmas, trajectory.eta)).where(mask, 0)
        totals = processes.gather(torch.stack([weight.sum(1), mask.sum(1).to(weight)], 1)).sum(0)
        experience.loss_weight = experience.loss_weight * weight * totals[1] / totals[0]
        return experience
