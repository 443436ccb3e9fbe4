"""TAFS-GRPO: few steps, each a finished picture with fresh noise on it, rewarded for itself (arXiv 2602.01591).

Rollout: in each step the network predicts a picture in one step, and noise of the next level is put on it, the fresh
share of which falls from step to step (kernel `cps`, plan `decay`): the picture changes and keeps what it shows.
Credit: the picture predicted from the state that a step leads to is scored, and the scores are normalised within the
group for each step on its own. No reward needs a gradient. Loss and KL are Flow-GRPO's.

Departures: after the abstract, which has no formula; no authors' code is published. That the fresh share falls by a
cosine, and that a step earns its next picture's reward alone, are ours.
"""

from torch import Tensor

from flowalign.algorithms.trajectory import base as trajectory
from flowalign.algorithms.trajectory.base import TrajectoryAlgorithm
from flowalign.config import Config
from flowalign.errors import ConfigError
from flowalign.rollouts.dense import Estimator, StateValues
from flowalign.rollouts.pictures import SampledPictures
from flowalign.rollouts.processes import Processes
from samplers import Decay


class TAFSGRPO(TrajectoryAlgorithm):
    """TAFS-GRPO: predicted pictures with fresh noise on them, each with its own reward (after the abstract of
    arXiv 2602.01591)."""

    name = "tafs_grpo"
    plan = (Decay, "{name: decay, minimum: 0.5}")
    fields = frozenset()
    dense = True

    def __init__(self, settings: trajectory.PolicySettings) -> None:
        super().__init__(settings)
        self.values = StateValues(Estimator(kind="one_step"))

    def check(self, config: Config) -> None:
        super().check(config)
        if config.rollout.kernel not in ("cps", "cps_published"):
            raise ConfigError(
                f"rollout.kernel: tafs_grpo puts fresh noise on predicted pictures, and '{config.rollout.kernel}' adds "
                "it to states; cps works"
            )

    def step_reward(self, sampled: SampledPictures, processes: Processes) -> Tensor:
        return self.values(sampled, processes)[:, 1:]
