"""DenseGRPO: step-level rewards from ODE completions (arXiv 2601.20218).

Credit: after stochastic step k the sample is finished by the ODE, decoded and scored: R_k; R_0 scores the
completion of the start noise. A step's reward is what it gained, d_k = R_k - R_{k-1}, so the rewards of a
trajectory add up to R_T - R_0. Advantages are normalised within the group for each step on its own. Rollout: with
plan `calibrated` the noise of each step adapts to the balance of its gains and losses. Loss: PPO's clip and KL.

Departure: no authors' code is published; the calibrated plan says where it leaves the paper's Algorithm 1.
"""

from torch import Tensor

from flowalign.algorithms.trajectory import base as trajectory
from flowalign.algorithms.trajectory.base import TrajectoryAlgorithm
from flowalign.core.credit import dense_rewards
from flowalign.data.batches import Batch
from flowalign.policies.diffusion import Rollout
from flowalign.rollouts.dense import Estimator
from flowalign.rollouts.diffusion import DiffusionActor
from rewards import Scores


class DenseGRPOSettings(trajectory.PolicySettings):
    estimator: Estimator = Estimator()
    """how the value of a half-denoised sample is found"""


class DenseGRPO(TrajectoryAlgorithm):
    """DenseGRPO: each step earns what it added to the completed picture's reward (arXiv 2601.20218)."""

    name = "dense_grpo"
    Settings = DenseGRPOSettings
    settings: DenseGRPOSettings
    fields = frozenset()
    dense = True

    def step_reward(self, actor: DiffusionActor, rollout: Rollout, batch: Batch, scores: Scores) -> Tensor:
        return dense_rewards(actor.values(rollout, batch, scores.value, self.settings.estimator))
