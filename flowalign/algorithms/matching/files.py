"""Pictures and videos of the data, as latents to learn from."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import PIL.Image
from diffusers.utils import load_video
from torch import Tensor

from flowalign.actors.diffusion import DiffusionActor

CLIPS = {".mp4", ".webm", ".mov", ".mkv", ".gif"}
"""endings of videos' files"""


def opened(file: str) -> Any:
    """A picture, or a video as a list of its frames."""
    if Path(file).suffix.lower() in CLIPS:
        return [frame.convert("RGB") for frame in load_video(file)]
    with PIL.Image.open(file) as picture:
        return picture.convert("RGB")


def latents_of(actor: DiffusionActor, files: Sequence[str]) -> Tensor:
    """[B, ...] latents of these files, brought to the size of the rollout; a file that comes twice is encoded once."""
    sampling = actor.config.rollout.arguments()
    size = {name: sampling[name] for name in ("height", "width", "batch_size") if name in sampling}
    distinct = list(dict.fromkeys(files))
    encoded = actor.policy.encode([opened(file) for file in distinct], **size)
    return encoded[[distinct.index(file) for file in files]]
