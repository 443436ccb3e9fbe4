"""A window of the last K steps, which DRaFT and DRaFT+ share."""

from pydantic import Field
from torch import Tensor

from flowalign.algorithms.direct.base import DirectAlgorithm, DirectExperience, DirectSettings
from flowalign.errors import ConfigError
from flowalign.policies.diffusion.window import GradientWindow


class LastStepsSettings(DirectSettings):
    last_steps: int | None = Field(1, ge=1)
    """K, the number of last steps that the gradient flows through; null: all."""


class LastSteps(DirectAlgorithm):
    """The gradient flows through the last K steps."""

    Settings = LastStepsSettings
    settings: LastStepsSettings

    def windows(self, steps: int) -> range:
        count = steps if self.settings.last_steps is None else self.settings.last_steps
        if count > steps:
            raise ConfigError(f"algorithm.last_steps: the schedule has {steps} steps, not {count}; null takes them all")
        return range(steps - count, steps - count + 1)

    def finished(self, window: GradientWindow, experience: DirectExperience) -> Tensor:
        [first] = self.windows(window.last)
        return window.walk(window.state(first), first)
