"""ReFL (arXiv 2304.05977): one step of a random late noise level, and the reward of the x0 predicted there.

Authors' code (THUDM/ImageReward, ReFL.py): 40 steps without guidance, the step drawn from 30 .. 39, loss
1e-3 * relu(2 - ImageReward). The paper's second term, the pre-training loss, is absent there and here.

Departure: every sample draws its own step; theirs one a batch.
"""

from torch import Tensor

from flowalign.algorithms.direct.base import DirectAlgorithm, DirectSettings, Experience
from flowalign.errors import ConfigError
from flowalign.policies.diffusion.window import Window


class ReFLSettings(DirectSettings):
    steps: tuple[int, int] = (30, 39)
    """first and last of the steps that one is drawn from, counted from 0; published: the last quarter"""


class ReFL(DirectAlgorithm):
    """ReFL: the reward of the x0 that one random late step predicts (arXiv 2304.05977)."""

    Settings = ReFLSettings
    settings: ReFLSettings

    def windows(self, steps: int) -> range:
        low, high = self.settings.steps
        if not 0 <= low <= high < steps:
            raise ConfigError(
                f"algorithm.steps: {[low, high]} must be steps of the schedule, 0 .. {steps - 1}; "
                f"{[steps * 3 // 4, steps - 1]} works"
            )
        return range(low, high + 1)

    def finished(self, window: Window, experience: Experience) -> Tensor:
        step = experience.first[window.samples]
        return window.leap(window.state(step), step)
