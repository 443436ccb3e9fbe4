"""DenseGRPO: step-level rewards from ODE completions (arXiv 2601.20218).

Credit: after stochastic step k the sample is finished by the ODE, decoded and scored: R_k; R_0 scores the
completion of the start noise. A step's reward is what it gained, d_k = R_k - R_{k-1}, so the rewards of a
trajectory add up to R_T - R_0. Advantages are normalised within the group for each step on its own. Rollout: with
plan `calibrated` the noise of each step adapts to the balance of its gains and losses. Loss: PPO's clip and KL.
`baseline: fitted` is ours: the slope of R_k on R_{k-1} is taken off, where the paper takes 1.

Departure: no authors' code is published; the calibrated plan says where it leaves the paper's Algorithm 1.
"""

from typing import Literal

import torch
from torch import Tensor

from flowalign.algorithms.trajectory import base as trajectory
from flowalign.algorithms.trajectory.base import TrajectoryAlgorithm, WithStateValues
from flowalign.config import Config
from flowalign.core.credit import dense_rewards, lasting_gains
from flowalign.errors import ConfigError
from flowalign.rollouts.dense import Estimator, StateValues
from flowalign.rollouts.pictures import SampledPictures
from flowalign.rollouts.processes import Processes


class DenseGRPOSettings(trajectory.PolicySettings):
    estimator: Estimator = Estimator()
    baseline: Literal["value", "fitted"] = "value"
    """Baseline of the value after a step: the value before it, as published, or the part of that which lasts."""


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

    def check(self, config: Config) -> None:
        super().check(config)
        if self.settings.baseline == "fitted" and hasattr(config.build_plan(), "update"):
            raise ConfigError(
                f"algorithm.baseline: the plan '{config.rollout.plan.name}' counts gains over the whole value before a "
                "step; value works"
            )

    def step_reward(self, sampled: SampledPictures, processes: Processes) -> Tensor:
        values = self.values(sampled, processes)
        if self.settings.baseline == "value":
            return dense_rewards(values)
        # slopes are of all processes
        values = processes.gather(values.to(processes.device))
        group = processes.gather(torch.tensor(sampled.batch.group, device=processes.device))
        return processes.own(lasting_gains(values, group), len(sampled.batch))
