"""Flow-GRPO-Fast: Flow-GRPO with one to three stochastic steps a rollout, drawn from an early range.

Rollout: the window of stochastic steps moves at random between iterations; with the plan `random` they need not follow
each other, as in Flow-Factory. Credit and loss are Flow-GRPO's. Published
(the authors' repository): size 3, start drawn from the first half, kernel `cps`, eta 0.8, clip 1e-5, no KL.

With `share_start_noise` the members of a group have the steps before the window in common. The authors' first release
did so for as many members as it sampled at once; the recipes follow their newest, where every member starts from a
noise of its own. Departure: one draw an iteration for all processes; the released code seeds each process's draw by its
rank.
"""

from flowalign.algorithms.trajectory.base import TrajectoryAlgorithm
from samplers import Random, Window


class FlowGRPOFast(TrajectoryAlgorithm):
    """Flow-GRPO-Fast: a random early window of one to three stochastic steps."""

    name = "flow_grpo_fast"
    plan = (Window | Random, "{name: window, size: 2, order: random}")
