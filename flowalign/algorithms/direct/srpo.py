"""SRPO (arXiv 2509.06942): one jump between two noise levels, x0 recovered by the known noise, a relative reward.

A finished sample is noised by known noise. The *denoising* branch noises it to a higher level and jumps down to the
level drawn, the *inversion* branch to a lower one and jumps up to it. There x0 is recovered by the very noise, and so
is exact under the exact velocity, whatever the level. The reward is relative: of one picture, (1 + k) times its score
for the prompt with a wanted prefix, less its score with an unwanted one. The branches pull the velocity in opposite
directions, so inversion swaps the prefixes: it unlearns what the unwanted one asks for.

Authors' code (Tencent-Hunyuan/SRPO, fastvideo/SRPO.py): FLUX, 25 ODE steps whose start noise is the known one, loss
relu(0.7 - r) averaged over the branches, k from 0.1 to 0.25 (denoising) and from 0.3 to 0.01 (inversion) the noisier
the level. Levels are from steps 5 to 25 of a schedule of 50, a tenth of this range apart: at 25 steps, one step.

Departures: levels come from the rollout's schedule, theirs from a grid of 1000; the jumps have the rollout's guidance,
theirs 3.5 where the rollout had 1; every sample has noise of its own, theirs one for all processes.
"""

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms.direct.base import DirectAlgorithm, DirectExperience, DirectSettings
from flowalign.errors import ConfigError
from flowalign.policies.diffusion.window import GradientWindow
from rewards import Latents, Scores


class SRPOSettings(DirectSettings):
    margin: float | None = 0.7
    wanted: list[str] = Field(["Natural-lighting", "Detail", "Detailed", "Real"], min_length=1)
    """Prefixes of the prompt, an iteration each in turn, with a full stop between; an empty one: the prompt alone."""
    unwanted: list[str] = Field(["Concept art", "Painting", "Anime", "Flat", "Oil"], min_length=1)
    steps: tuple[int, int] = (3, 12)
    """Steps of the schedule, the noisiest and the cleanest to jump from; published: the levels of these two of 25."""
    jump: int = Field(1, ge=1)
    """Steps between two levels."""
    k_denoising: tuple[float, float] = (0.1, 0.25)
    """Discount at the cleanest and at the noisiest level; published for HPSv2, and (0.1, 0.5) for PickScore."""
    k_inversion: tuple[float, float] = (0.3, 0.01)
    """Discount at the cleanest and at the noisiest level; published for HPSv2, and (0.6, 0.01) for PickScore."""


class SRPO(DirectAlgorithm):
    """SRPO: a jump between noise levels, x0 by the known noise, a reward relative to prefixes (arXiv 2509.06942)."""

    name = "srpo"
    Settings = SRPOSettings
    settings: SRPOSettings

    def windows(self, steps: int) -> range:
        (noisy, clean), jump = self.settings.steps, self.settings.jump
        reached = range(noisy + jump, clean - jump + 1)
        # at the first step all is noise, and x0 cannot be recovered
        if not reached or noisy < 1 or clean >= steps:
            raise ConfigError(
                f"algorithm.steps: from {noisy} to {clean}, in 1 .. {steps - 1}, no level is {jump} steps from either; "
                f"{[1, steps - 1]} with jump: 1 works"
            )
        return reached

    def finished(self, window: GradientWindow, experience: DirectExperience) -> Tensor:
        level, jump = experience.first[window.samples], self.settings.jump
        x0, noise = window.state(window.last), window.state(0)
        down = window.leap(window.noised(x0, noise, level - jump), level - jump, level)
        up = window.leap(window.noised(x0, noise, level + jump), level + jump, level)
        return window.recovered(torch.cat([down, up]), noise.repeat(2, *[1] * (x0.dim() - 1)), level.repeat(2))

    def scored(self, experience: DirectExperience, samples: Tensor, made: Tensor | Latents) -> Scores:
        down, _ = samples.chunk(2)
        wanted, unwanted = (
            self._prefixed(prefixes, experience, down) for prefixes in (self.settings.wanted, self.settings.unwanted)
        )
        praised = experience.score(samples, made, wanted + unwanted).value
        blamed = experience.score(samples, made, unwanted + wanted).value
        (noisy, clean), level = self.settings.steps, experience.first[down]
        noisiness = [(clean - level) / (clean - noisy), (clean - level - self.settings.jump) / (clean - noisy)]
        ranges = (self.settings.k_denoising, self.settings.k_inversion)
        k = torch.cat([low + (high - low) * at for at, (low, high) in zip(noisiness, ranges, strict=True)])
        return Scores((1 + k.to(praised)) * praised - blamed, {"praised": praised.detach()})

    def _prefixed(self, prefixes: Sequence[str], experience: DirectExperience, samples: Tensor) -> list[str]:
        """The prompts of these samples with this iteration's prefix."""
        prefix = prefixes[experience.batch.iteration % len(prefixes)]
        prompts = [experience.rollout.prompts[i] for i in samples.tolist()]
        return [f"{prefix}. {prompt}" for prompt in prompts] if prefix else prompts
