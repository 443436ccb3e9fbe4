"""DRaFT (arXiv 2309.17400): the reward's gradient through the last K steps of sampling.

K = 1 is DRaFT-1, K = the number of steps is DRaFT. DRaFT-LV is K = 1 with a gradient of lower variance: finished
samples are noised again to the level of the last step, each `draws` times, and that step takes these back too.

The authors published no code; this is the paper's description.
"""

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms.direct.base import DirectExperience
from flowalign.algorithms.direct.last_steps import LastSteps, LastStepsSettings
from flowalign.config import Config
from flowalign.errors import ConfigError
from flowalign.policies.diffusion.window import GradientWindow


class DRaFTSettings(LastStepsSettings):
    draws: int = Field(0, ge=0)
    """DRaFT-LV: times that a finished sample is noised again for the last step; published: 2."""


class DRaFT(LastSteps):
    """DRaFT: the reward's gradient through the last K steps (arXiv 2309.17400)."""

    name = "draft"
    Settings = DRaFTSettings
    settings: DRaFTSettings

    def check(self, config: Config) -> None:
        super().check(config)
        if self.settings.draws and self.settings.last_steps != 1:
            raise ConfigError("algorithm.draws: samples are noised again for the last step alone; last_steps: 1 works")

    def finished(self, window: GradientWindow, experience: DirectExperience) -> Tensor:
        samples, last = [super().finished(window, experience)], window.last - 1
        for number in range(self.settings.draws):
            noised = window.noised(window.state(window.last), experience.noise(window.samples, number), last)
            samples.append(window.leap(noised, last))
        return torch.cat(samples)
