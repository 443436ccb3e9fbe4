"""SRPO (arXiv 2509.06942): one jump between two noise levels, x0 recovered by the known noise, a relative reward.

A finished sample is noised by known noise. The *denoising* branch noises it to the higher level and jumps down to the
lower one; the *inversion* branch noises it to the lower level and jumps up. From where a jump ends x0 is recovered by
the very noise, and so is exact under the exact velocity, whatever the level. The reward is relative: of one picture,
(1 + k) times its score for the prompt with a wanted prefix, less its score with an unwanted one. The branches pull the
velocity in opposite directions, so inversion swaps the prefixes: it unlearns what the unwanted one asks for.

Authors' code (Tencent-Hunyuan/SRPO, fastvideo/SRPO.py): FLUX at 720 pixels, 25 steps without guidance, levels from
step 5 on, a jump of a tenth of these levels, loss relu(0.7 - r) averaged over the branches, scores of CLIP type
divided by 20, k rising from 0.1 to 0.25 (denoising) and falling from 0.3 to 0.01 (inversion) towards less noise.

Departures: levels are those of the rollout's schedule, theirs a grid of 1000 between its steps; the jumps have the
rollout's guidance, theirs 3.5 where the rollout had none.
"""

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms.direct.base import DirectAlgorithm, DirectSettings, Experience
from flowalign.errors import ConfigError
from flowalign.policies.diffusion.window import Window
from rewards import Scores


class SRPOSettings(DirectSettings):
    margin: float | None = 0.7
    wanted: str = "Realism"
    """put before the prompt, with a full stop between; empty: the prompt alone"""
    unwanted: str = "Painting"
    first_step: int = Field(5, ge=1)
    """of the schedule's steps, the noisiest that is jumped from or to"""
    jump: int = Field(2, ge=1)
    """steps between the two levels"""
    k_denoising: tuple[float, float] = (0.1, 0.25)
    """at the noisiest level and at the cleanest; published for HPSv2, and (0.1, 0.5) for PickScore"""
    k_inversion: tuple[float, float] = (0.3, 0.01)
    """published for HPSv2, and (0.6, 0.01) for PickScore"""


class SRPO(DirectAlgorithm):
    """SRPO: a jump between noise levels, x0 by the known noise, a reward relative to prefixes (arXiv 2509.06942)."""

    Settings = SRPOSettings
    settings: SRPOSettings

    def windows(self, steps: int) -> range:
        begins = range(self.settings.first_step, steps - self.settings.jump)
        if not begins:
            raise ConfigError(
                f"algorithm.first_step: from step {begins.start} no jump over {self.settings.jump} stays within "
                f"{steps} steps; first_step: 1 with jump: 1 works from 3 steps on"
            )
        return begins

    def finished(self, window: Window, experience: Experience) -> Tensor:
        high = experience.first[window.samples]
        low = high + self.settings.jump
        x0, noise = window.state(window.last), experience.noise(window.samples)
        down = window.leap(window.noised(x0, noise, high), high, low)
        up = window.leap(window.noised(x0, noise, low), low, high)
        return torch.cat([window.recovered(down, noise, low), window.recovered(up, noise, high)])

    def scores(self, experience: Experience, samples: Tensor, pixels: Tensor) -> Scores:
        down, up = samples.chunk(2)
        texts = [experience.rollout.prompts[i] for i in down.tolist()]
        wanted, unwanted = (
            [f"{own}. {text}" if own else text for text in texts]
            for own in (self.settings.wanted, self.settings.unwanted)
        )
        praised = experience.score(samples, pixels, wanted + unwanted)
        blamed = experience.score(samples, pixels, unwanted + wanted)
        begins = self.windows(len(experience.rollout.trajectory.sigmas) - 1)
        place = (experience.first[down] - begins.start) / max(len(begins) - 1, 1)
        ranges = (self.settings.k_denoising, self.settings.k_inversion)
        k = torch.cat([start + (end - start) * place for start, end in ranges]).to(praised.value)
        return Scores((1 + k) * praised.value - blamed.value, {"wanted": torch.cat([praised.value[: len(up)]] * 2)})
