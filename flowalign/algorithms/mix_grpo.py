"""MixGRPO: SDE steps in a sliding window, ODE elsewhere (arXiv 2507.21802).

Rollout: `window` consecutive stochastic steps, moved on every `every` iterations from the early, noisy steps to the
late ones. Credit: each reward is normalised within its group and the advantages are summed. Loss: PPO's clip on the
steps of the window only.

Departure: the window keeps its size at the end of the schedule and then starts over; the released one shrinks
until an iteration trains nothing. MixGRPO-Flash's second-order solver after the window is not here.
"""

from typing import TYPE_CHECKING

from flowalign.algorithms import trajectory
from flowalign.algorithms.trajectory import TrajectoryAlgorithm
from flowalign.errors import ConfigError

if TYPE_CHECKING:
    from flowalign.config import Config


class MixGRPOSettings(trajectory.PolicySettings):
    combine: trajectory.Combine = "advantage"


class MixGRPO(TrajectoryAlgorithm):
    """MixGRPO: a window of stochastic steps that slides over the schedule (arXiv 2507.21802)."""

    Settings = MixGRPOSettings

    def check(self, config: "Config") -> None:
        if config.rollout.plan.name != "window":
            raise ConfigError(
                f"rollout.plan: mix_grpo slides a window, not the plan '{config.rollout.plan.name}'; "
                "plan: {name: window, size: 4, order: progressive, every: 25} works"
            )
