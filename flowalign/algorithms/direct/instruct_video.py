"""InstructVideo (arXiv 2312.12490): editing in the place of sampling, rewarded frame by frame.

A finished sample is noised to a level on the way and denoised by the rest of the schedule; the gradient flows through
the last steps of that partial chain. The reward of a video's frames is `per_frame`, with an `attenuation` that lets
the ends of a video count less than its middle.

Authors' code (ali-vilab/VGen): 20 DDIM steps with eta 0, noised to 0.6 of the levels, a gradient of 1 step, HPSv2 of 4
frames, one of each segment at random, weighted by exp(-attenuation * distance from the middle); LoRA of rank 4.

Departures: videos to edit are the policy's own, where theirs are a dataset's; frames are evenly spread, not random.
"""

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms.direct.base import DirectAlgorithm, DirectExperience, DirectSettings
from flowalign.errors import ConfigError
from flowalign.policies.diffusion.window import GradientWindow


class InstructVideoSettings(DirectSettings):
    strength: float = Field(0.6, gt=0, le=1)
    """Share of the steps that take the noised sample back."""
    last_steps: int = Field(1, ge=1)
    """Number of these steps, counted from the last, that the gradient flows through."""


class InstructVideo(DirectAlgorithm):
    """InstructVideo: the reward of a sample's frames after it was noised and denoised again (arXiv 2312.12490)."""

    name = "instruct_video"
    Settings = InstructVideoSettings
    settings: InstructVideoSettings

    def windows(self, steps: int) -> range:
        partial = round(self.settings.strength * steps)
        if partial < self.settings.last_steps:
            raise ConfigError(
                f"algorithm.strength: {self.settings.strength} of {steps} steps are {partial}, and the gradient is to "
                f"flow through {self.settings.last_steps}; a larger strength works"
            )
        return range(steps - partial, steps - partial + 1)

    def finished(self, window: GradientWindow, experience: DirectExperience) -> Tensor:
        [first] = self.windows(window.last)
        x = window.noised(window.state(window.last), experience.noise(window.samples), first)
        for step in range(first, window.last):
            with torch.set_grad_enabled(step >= window.last - self.settings.last_steps):
                x = window.leap(x, step, step + 1)
        return x
