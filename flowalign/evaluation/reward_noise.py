"""Noise of a reward: how far its value of one picture changes when it is read again, cropped or compressed."""

import io
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from flowalign.evaluation.scores import Evaluated
from flowalign.evaluation.statistics import Interval, redrawn
from rewards import Reward, score, spec_of

Array = NDArray[np.float64]


def _cropped(picture: Image.Image, left: bool) -> Image.Image:
    """A crop that leaves out 4% at the left and the top, or at the right and the bottom, at the same size."""
    width, height = picture.size
    across, down = width * 4 // 100, height * 4 // 100
    box = (across, down, width, height) if left else (0, 0, width - across, height - down)
    return picture.crop(box).resize(picture.size, Image.Resampling.BICUBIC)


def _compressed(picture: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    picture.convert("RGB").save(file, "JPEG", quality=quality)
    return Image.open(file).convert("RGB")


DISTURBANCES: Mapping[str, Callable[[Image.Image], Image.Image]] = {
    "same picture twice": lambda picture: picture,
    "crop without 4% at the left and top": lambda picture: _cropped(picture, True),
    "crop without 4% at the right and bottom": lambda picture: _cropped(picture, False),
    "JPEG at 90": lambda picture: _compressed(picture, 90),
    "JPEG at 75": lambda picture: _compressed(picture, 75),
}


def reward_noise(reward: Reward, result: Evaluated) -> dict[str, Interval]:
    """Noise of the reward over its spread in a prompt's samples, by what was done to pictures; texts are read twice.

    A sample's two values r, r' have the noise sd(r' - r) / sqrt(2); a shift that all samples have alike is none.
    """
    if spec_of(reward).needs & {"latents", "sound", "frames", "reference"} or not result.samples:
        return {}
    pictures = isinstance(result.samples[0], Image.Image)
    numbers = {prompt: i for i, prompt in enumerate(dict.fromkeys(result.prompts))}
    group = np.array([numbers[prompt] for prompt in result.prompts])
    records = [
        record | {"group": number, "seed": seed}
        for record, number, seed in zip(result.metadata, group.tolist(), result.seeds, strict=True)
    ]
    value = np.array(result.value)
    draws = redrawn(len(numbers))
    count = np.bincount(group)

    def squares(values: Array) -> Array:
        """Sum of squares around the group's mean, of each group."""
        centred = values - (np.bincount(group, values) / count)[group]
        total: Array = np.bincount(group, centred**2).astype(np.float64)
        return total

    spread = squares(value)
    if not spread.any():
        return {}
    noise = {}
    for name, change in DISTURBANCES.items():
        if not pictures and name != "same picture twice":
            continue
        samples = [change(sample) for sample in result.samples] if pictures else result.samples
        again = score(reward, samples, result.prompts, records).value.double().numpy()
        error = squares(again - value) / 2
        below = draws @ spread
        ratios = np.sqrt(np.divide(draws @ error, below, out=np.zeros(len(draws)), where=below > 0))
        low, high = np.quantile(ratios, (0.025, 0.975)).tolist()
        noise[name if pictures else "same text twice"] = Interval(float((error.sum() / spread.sum()) ** 0.5), low, high)
    return noise
