"""Flow-GRPO-Fast: Flow-GRPO with one or two stochastic steps a rollout, drawn from an early range.

Rollout: the window of stochastic steps moves at random between iterations; the group starts from one noise, so the
deterministic steps before the window are the same for all its members. Credit and loss are Flow-GRPO's. Published
(the authors' repository): size 2, start drawn from the first half, eta 0.8, clip 1e-5, no KL.

Departure: one draw an iteration for all processes; the released code seeds each process's draw by its rank.
"""

from flowalign.algorithms.trajectory.base import TrajectoryAlgorithm
from flowalign.config import Config
from flowalign.errors import ConfigError


class FlowGRPOFast(TrajectoryAlgorithm):
    """Flow-GRPO-Fast: a random early window of one or two stochastic steps."""

    def check(self, config: Config) -> None:
        if config.rollout.plan.name != "window":
            raise ConfigError(
                f"rollout.plan: flow_grpo_fast trains a window, not the plan '{config.rollout.plan.name}'; "
                "plan: {name: window, size: 2, order: random} works"
            )
