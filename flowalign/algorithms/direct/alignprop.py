"""AlignProp (arXiv 2310.03739): the reward's gradient through the sampling, cut off at a random step.

Authors' code (mihirp1998/AlignProp, sd_pipeline.py): 50 DDIM steps with eta 1 and guidance 5; predictions before step
T are detached, T drawn from a normal distribution (42, 5) until it is in [1, 50).

The draw is one for all samples of an iteration, as theirs is one a batch.
"""

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms.direct.base import DirectAlgorithm, DirectExperience, DirectSettings
from flowalign.config import Config
from flowalign.data.batches import Batch
from flowalign.errors import ConfigError
from flowalign.policies.diffusion.window import GradientWindow
from samplers import derive_seed


class AlignPropSettings(DirectSettings):
    mean: float = Field(0.84, ge=0, le=1)
    """Mean step at which the window begins, as a share of the steps; published: 42 of 50."""
    std: float = Field(0.1, gt=0)
    """Standard deviation of that step, as a share of the steps; published: 5 of 50."""


class AlignProp(DirectAlgorithm):
    """AlignProp: the reward's gradient through the steps after a random one (arXiv 2310.03739)."""

    name = "alignprop"
    Settings = AlignPropSettings
    settings: AlignPropSettings

    def windows(self, steps: int) -> range:
        if steps < 2:
            raise ConfigError("rollout.steps: a random step after the first takes at least 2; 5 works")
        return range(1, steps)

    def first_steps(self, batch: Batch, config: Config) -> Tensor:
        steps, begins = config.rollout.steps, self.windows(config.rollout.steps)
        source = torch.Generator().manual_seed(derive_seed(config.training.seed, batch.iteration, 5))
        first = -1
        while first not in begins:
            first = int(steps * (self.settings.mean + self.settings.std * torch.randn((), generator=source)))
        return torch.full((len(batch),), first)

    def finished(self, window: GradientWindow, experience: DirectExperience) -> Tensor:
        first = int(experience.first[0])
        return window.walk(window.state(first), first)
