"""DenseGRPO: step-level rewards from ODE completions (arXiv 2601.20218).

Credit: after stochastic step k the sample is finished by the ODE, decoded and scored: R_k; R_0 scores the
completion of the start noise. A step's reward is what it gained, d_k = R_k - R_{k-1}, so the rewards of a
trajectory add up to R_T - R_0. Advantages are normalised within the group for each step on its own. Rollout: with
plan `calibrated` the noise of each step adapts to the balance of its gains and losses. Loss: PPO's clip and KL.

Departure: no authors' code is published; the calibrated plan says where it leaves the paper's Algorithm 1.
"""

from torch import Tensor

from flowalign.algorithms.trajectory import base as trajectory
from flowalign.algorithms.trajectory.base import TrajectoryAlgorithm, WithStateValues
from flowalign.core.credit import dense_rewards
from flowalign.rollouts.dense import Estimator, StateValues
from flowalign.rollouts.pictures import SampledPictures
from flowalign.rollouts.processes import Processes


class DenseGRPOSettings(trajectory.PolicySettings):
    estimator: Estimator = Estimator()


class DenseGRPO(WithStateValues, TrajectoryAlgorithm):
    """DenseGRPO: each step earns what it added to the completed picture's reward (arXiv 2601.20218)."""

    name = "dense_grpo"
    Settings = DenseGRPOSettings
    settings: DenseGRPOSettings
    fields = frozenset()
    dense = True

    def __init__(self, settings: DenseGRPOSettings) -> None:
        super().__init__(settings)
        self.values = StateValues(settings.estimator)

    def step_reward(self, sampled: SampledPictures, processes: Processes) -> Tensor:
        return dense_rewards(self.values(sampled, processes))
