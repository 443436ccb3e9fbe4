"""The samples that a trainer saves at each evaluation, with small copies of their pictures for the gallery.

    samples/iteration-000010/
        samples.jsonl       a line for each sample
        00000.png           pictures that the lines name; 00000.webp, animated, for a video, 00000.wav for a sound
        thumbnails/         small copies of large pictures, 00000.png.jpg

A line is `{"picture", "prompt", "seed", "metadata", "rewritten"}` and scores by name: `picture` names a picture or a
clip of the folder, and `rewritten`, if it is there, is the prompt after a prompt rewriter. A line of a text has `text`
instead of `picture`.
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from PIL import Image

from flowalign.runs.sounds import drawn, save_sound

if TYPE_CHECKING:
    from rewards import Sound

FOLDER = "samples"
THUMBNAIL = 192
"""Pixels of a thumbnail's longer side; pictures up to this size are their own thumbnails."""
MILLISECONDS = 125
"""Milliseconds of a video's frame."""


Picture: TypeAlias = "Image.Image | Sequence[Image.Image] | Sound"
"""A picture, the frames of a video, or a sound."""
Sample: TypeAlias = "str | Picture"
"""A picture, a video, a sound or a text."""


def save_samples(run: Path, iteration: int, samples: Iterable[tuple[Sample, Mapping[str, Any]]]) -> Path:
    """Save samples into a run's folder; they appear by one rename, and replace earlier ones of the same iteration.

    Args:
        samples: each with the other fields of its line.

    Returns:
        the folder of the iteration's samples.
    """
    final = run / FOLDER / f"iteration-{iteration:06d}"
    partial = final.with_name(f".partial-{final.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    lines = []
    for number, (sample, record) in enumerate(samples):
        if isinstance(sample, str):
            lines.append(json.dumps({"text": sample, **record}) + "\n")
            continue
        path = save_picture(sample, partial / f"{number:05d}", "png")
        first = frames_of(sample)[0]
        if path.suffix != ".wav" and max(first.size) > THUMBNAIL:
            save_thumbnail(first.copy(), thumbnail_of(path))
        lines.append(json.dumps({"picture": path.name, **record}) + "\n")
    (partial / "samples.jsonl").write_text("".join(lines), encoding="utf-8")
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    return final


def save_picture(sample: Picture, path: Path, ending: str, **settings: Any) -> Path:
    """Write a picture, frames as an animated WebP, or a sound as WAV; returns the path with its ending."""
    if isinstance(sample, Image.Image):
        path = path.with_suffix(f".{ending}")
        sample.save(path, **settings)
    elif not isinstance(sample, Sequence):
        path = save_sound(sample, path)
    else:
        path = path.with_suffix(".webp")
        sample[0].save(path, save_all=True, append_images=sample[1:], duration=MILLISECONDS, loop=0, **settings)
    return path


def frames_of(sample: Picture) -> Sequence[Image.Image]:
    """A picture, or a drawing of a sound, as its only frame; a video's frames."""
    if isinstance(sample, Sequence):
        return sample
    return [sample if isinstance(sample, Image.Image) else drawn(sample)]


def thumbnail_of(picture: Path) -> Path:
    """Path of a picture's thumbnail, which saves the gallery from decoding the picture."""
    return picture.parent / "thumbnails" / f"{picture.name}.jpg"


def save_thumbnail(picture: Image.Image, path: Path) -> None:
    """Shrink a picture and write it as a JPEG, which is encoded ten times faster than a WebP."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # first by a whole number, which saves time without a visible difference
    picture.thumbnail((THUMBNAIL, THUMBNAIL), reducing_gap=1.1)
    if picture.has_transparency_data:
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture.convert("RGBA"))
    picture.convert("RGB").save(path, quality=85)
