"""R0 (arXiv 2503.13070): a few-step generator by regularised reward maximisation alone, without distillation.

The generator is what the network predicts x0 to be, at every level of a short schedule whose steps draw their noise
afresh (`rollout.kernel: cps` with eta 1). Every prediction is an image to maximise the reward of; what is not to be
valid images is kept away by the distance from the start weights' predictions.

After the abstract, for want of code: which regularisation, and its weight, are ours.
"""

from pydantic import Field
from torch import Tensor

from flowalign.algorithms.direct.base import DirectAlgorithm, DirectExperience, DirectSettings
from flowalign.policies.diffusion.window import GradientWindow


class R0Settings(DirectSettings):
    kl_weight: float = Field(0.1, gt=0)
    """Weight of the mean squared difference of the velocities from the start weights'."""


class R0(DirectAlgorithm):
    """R0: the reward of the x0 predicted at any of a few steps, and nearness to the start (arXiv 2503.13070)."""

    name = "r0"
    Settings = R0Settings
    settings: R0Settings

    def windows(self, steps: int) -> range:
        return range(steps)

    def finished(self, window: GradientWindow, experience: DirectExperience) -> Tensor:
        step = experience.first[window.samples]
        return window.leap(window.state(step), step)
