"""HiCoGen's reinforcement learning: hierarchical rewards and decaying stochasticity (arXiv 2511.19965).

Rollout: plan `decay`, noise that falls from the first step to the last by a cosine. Credit: a picture is scored as a
whole, by its subjects and by their relation; the levels are added up, and a level that does not apply to a prompt (no
relation in it) is left out. Loss: PPO's clip.

Departure: no code is published and the level weights are not given; they are 1 here.
"""

from torch import Tensor

from flowalign.algorithms.trajectory import base as trajectory
from flowalign.algorithms.trajectory.base import TrajectoryAlgorithm
from flowalign.core.credit import hierarchical
from flowalign.rollouts.pictures import SampledPictures
from flowalign.rollouts.processes import Processes
from rewards import RewardError
from samplers import Decay


class HiCoGenSettings(trajectory.PolicySettings):
    levels: dict[str, float] = {"global": 1.0, "subject": 1.0, "relation": 1.0}
    """Weights of the parts of the reward's scores; parts may be NaN where they do not apply."""


class HiCoGen(TrajectoryAlgorithm):
    """HiCoGen: global, subject and relation rewards of one picture, noise that decays (arXiv 2511.19965)."""

    name = "hicogen"
    Settings = HiCoGenSettings
    settings: HiCoGenSettings
    fields = frozenset()
    plan = (Decay, "{name: decay, minimum: 0.1}")

    def step_reward(self, sampled: SampledPictures, processes: Processes) -> Tensor:
        scores = sampled.scores
        missing = [name for name in self.settings.levels if name not in scores.parts]
        if missing:
            raise RewardError(
                f"reward '{sampled.scorer.reward.name}' has no part '{missing[0]}' that hicogen weights; "
                f"it has {', '.join(scores.parts) or 'none'}"
            )
        return hierarchical({name: scores.parts[name] for name in self.settings.levels}, self.settings.levels)
