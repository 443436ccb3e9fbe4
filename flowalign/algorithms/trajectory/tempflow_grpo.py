"""TempFlow-GRPO: branches at every step, weighted by their noise (arXiv 2508.04324).

Rollout: each prompt has one deterministic trajectory, which the group leaves at every step by one stochastic step.
Credit: the reward of a finished branch belongs to the step that left, normalised among the members that left at the
same state. Loss: PPO's clip, each step weighted by the standard deviation of its noise, normalised to mean 1
over the steps; the divergence is not weighted.
"""

from torch import Tensor

from flowalign.algorithms.trajectory.base import Steps, TrajectoryAlgorithm
from flowalign.algorithms.trajectory.branching import SINGLE, branch_everywhere, places
from flowalign.config import Config
from flowalign.core.step_losses import noise_weight
from flowalign.data.batches import Batch
from flowalign.policies.diffusion import Rollout
from flowalign.rollouts.pictures import DiffusionSampler
from samplers import step_std


class TempFlowGRPO(TrajectoryAlgorithm):
    """TempFlow-GRPO: single-step branches at every step, weighted by their noise (arXiv 2508.04324)."""

    name = "tempflow_grpo"
    plan = SINGLE
    combines = TrajectoryAlgorithm.combines - {"whole", "served"}

    def branches(self, config: Config) -> int:
        return len(places(config))

    def rollout(self, sampler: DiffusionSampler, batch: Batch) -> tuple[Rollout, Batch]:
        return branch_everywhere(sampler, batch)

    def loss(self, actions: Steps) -> tuple[Tensor, dict[str, Tensor]]:
        trajectory = actions.rollout.trajectory
        trained = trajectory.mask.any(0)
        std = step_std(actions.rollout.kernel, trajectory.sigmas, trajectory.eta.amax(0))
        weight = noise_weight(std[None], trained[None])[0, actions.steps]
        loss, metrics = self.policy_loss(actions)
        penalty, more = self.penalty(actions)
        return weight * loss + penalty, metrics | more
