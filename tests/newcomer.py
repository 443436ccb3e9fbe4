"""Three methods written from docs/extending.md alone. All ran as first written; the last one learned nothing at its
first temperature, 0.5, where tanh of the reward is flat, which the run said."""

import torch
from pydantic import Field

from flowalign.algorithms.direct.base import DirectAlgorithm, DirectSettings
from flowalign.algorithms.matching.online import OnlineMatching, OnlineSettings
from flowalign.algorithms.trajectory.base import PolicySettings, TrajectoryAlgorithm


class MedianSettings(PolicySettings):
    late: float = Field(0.5, ge=0, le=1)
    """Share of the reward that the first step gets; the last one gets all."""


class MedianGRPO(TrajectoryAlgorithm):
    """Rewards rise along the steps, and are compared with the group's median."""

    Settings = MedianSettings
    settings: MedianSettings

    def step_reward(self, sampled, processes):
        reward, mask = sampled.scores.value, sampled.rollout.mask
        share = torch.linspace(self.settings.late, 1, mask.shape[1])
        return reward[:, None] * share

    def credit(self, record):
        advantage = torch.zeros_like(record.reward)
        for number in record.group.unique():
            rows = record.group == number
            advantage[rows] = record.reward[rows] - record.reward[rows].median(0).values
        return advantage * record.mask

    def loss(self, actions):
        loss, values = super().loss(actions)
        return loss, values | {"policy/step": actions.steps.float()}


class MarginSettings(OnlineSettings):
    margin: float = Field(0.1, ge=0)
    """How much better than the start weights' the error of a good sample is to be."""


class Margin(OnlineMatching):
    """Good samples are matched until their error is a margin below that of the start weights."""

    Settings = MarginSettings
    settings: MarginSettings
    compares = frozenset({"reference"})

    def credit(self, record):
        return (record.reward > record.reward.mean()).float()

    def loss(self, points):
        gap = points.error - points.error_reference + self.settings.margin
        return points.advantage * gap.relu(), {"margin/gap": gap}


class LastTwoSettings(DirectSettings):
    temperature: float = Field(20.0, gt=0)
    """Scale of the reward in the loss."""


class LastTwo(DirectAlgorithm):
    """The gradient of a squashed reward through the last two steps."""

    Settings = LastTwoSettings
    settings: LastTwoSettings

    def windows(self, steps):
        return range(steps - 2, steps - 1)

    def finished(self, window, experience):
        first = window.last - 2
        return window.walk(window.state(first), first)

    def loss(self, scores):
        loss = -torch.tanh(scores.value / self.settings.temperature)
        return loss, {"reward/mean": scores.value}
