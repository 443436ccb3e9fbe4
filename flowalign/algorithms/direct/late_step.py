"""A window of one random late step, and the x0 predicted there; ReFL and what compares with a reference share it."""

from torch import Tensor

from flowalign.algorithms.direct.base import DirectAlgorithm, DirectExperience, DirectSettings
from flowalign.errors import ConfigError
from flowalign.policies.diffusion.window import GradientWindow


class LateStepSettings(DirectSettings):
    steps: tuple[int, int] = (30, 39)
    """First and last step of the range that one is drawn from, counted from 0; published: the last quarter."""


class LateStep(DirectAlgorithm):
    """The gradient flows through one late step, to what it predicts."""

    Settings = LateStepSettings
    settings: LateStepSettings

    def windows(self, steps: int) -> range:
        low, high = self.settings.steps
        if not 0 <= low <= high < steps:
            raise ConfigError(
                f"algorithm.steps: {[low, high]} must be steps of the schedule, 0 .. {steps - 1}; "
                f"{[steps * 3 // 4, steps - 1]} works"
            )
        return range(low, high + 1)

    def finished(self, window: GradientWindow, experience: DirectExperience) -> Tensor:
        step = experience.first[window.samples]
        return window.leap(window.state(step), step)
