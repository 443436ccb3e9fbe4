"""VGPO: the value of a step is what its later states are worth, and values count beside ranks (arXiv 2512.12387).

Credit: after each step the picture that the ODE predicts in one step is scored, R_1 .. R_T; where no noise follows it
is the finished one. The value of a step is the discounted sum of its own and later scores, Q_k = R_k + gamma Q_{k+1}.
The advantage `anchored` weighs steps by their mean value, and adds the value itself to its place in the group, so that
a group without spread still teaches. Rewards start at 0. Rollout, loss and KL are Flow-GRPO's.

Departures: no authors' code is published, and of the paper the abstract and its reviews of equations 9 to 13 could be
read, not the text. gamma, the size of the anchor and the mean that weighs steps, a group's, are ours.
"""

import torch
from torch import Tensor

from flowalign.algorithms.trajectory import base as trajectory
from flowalign.algorithms.trajectory.base import TrajectoryAlgorithm, WithStateValues
from flowalign.config import Named
from flowalign.core.groups import Discount, returns_of
from flowalign.rollouts.dense import Estimator, StateValues
from flowalign.rollouts.pictures import SampledPictures
from flowalign.rollouts.processes import Processes


class VGPOSettings(trajectory.PolicySettings):
    advantage: Named = Named(name="anchored", anchor=0.1)
    gamma: Discount = 0.9
    """Discount of later states' rewards, from step to step."""
    estimator: Estimator = Estimator(kind="one_step")


class VGPO(WithStateValues, TrajectoryAlgorithm):
    """VGPO: discounted rewards of predicted pictures, weighed by step and anchored by size (arXiv 2512.12387)."""

    name = "vgpo"
    Settings = VGPOSettings
    settings: VGPOSettings
    fields = frozenset()
    dense = True

    def __init__(self, settings: VGPOSettings) -> None:
        super().__init__(settings)
        self.values = StateValues(settings.estimator)

    def step_reward(self, sampled: SampledPictures, processes: Processes) -> Tensor:
        reached = self.values(sampled, processes)[:, 1:]
        return returns_of(reached, torch.ones_like(reached, dtype=torch.bool), self.settings.gamma)
