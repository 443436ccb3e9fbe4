"""The one place that opens files of pictures, which may be anybody's: what comes out is RGB, upright and 8 bits."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, ImageSequence


class PictureError(ValueError):
    """A file that is not opened as a picture; the message names it and says why."""


@contextlib.contextmanager
def opened(file: str | Path) -> Iterator[Image.Image]:
    """Within it a file of a picture, or of an animated one, is open; what Pillow says of it is an error with its name.

    Raises:
        PictureError: there is no such plain file, or it cannot be read as a picture.
    """
    try:
        # a pipe would be waited for
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise PictureError(f"{file} is no file, and a picture is one")
        Image.init()
        # Pillow hands EPS to Ghostscript, a program with a language of its own
        with Image.open(file, formats=[name for name in Image.ID if name != "EPS"]) as picture:
            yield picture
    except PictureError:
        raise
    except FileNotFoundError as error:
        raise PictureError(f"no picture at {file}") from error
    except Exception as error:
        # Pillow's readers raise errors of all kinds at damaged files
        said = " ".join(str(error).split())[:120]
        raise PictureError(f"{file} cannot be read as a picture: {said}") from error


def read_picture(file: str | Path) -> Image.Image:
    """The picture in a file, turned as its EXIF says; of an animated one the first frame.

    16 bits of grey become 8; other depths, and numbers that are not finite, are refused: what they would mean as
    colours is anybody's guess.

    Returns:
        [height, width] in RGB.

    Raises:
        PictureError: there is no such plain file, it cannot be read as a picture, or not as colours.
    """
    with opened(file) as picture:
        upright = ImageOps.exif_transpose(picture)
        if upright.mode.startswith("I;16"):
            return Image.fromarray((np.asarray(upright).astype(np.uint32) // 257).astype(np.uint8)).convert("RGB")
        if upright.mode in ("I", "F"):
            raise PictureError(
                f"{file} has values of 32 bits, which are no colours; save it with 8 or 16 bits a channel"
            )
        return upright.convert("RGB")


def read_frames(file: str | Path) -> list[Image.Image]:
    """The frames of an animated picture in RGB, one of a still one; see `opened`."""
    with opened(file) as picture:
        return [frame.convert("RGB") for frame in ImageSequence.Iterator(picture)]


def is_animated(file: str | Path) -> bool:
    """Whether a picture has more than one frame, as its header says; see `opened`."""
    with opened(file) as picture:
        return bool(getattr(picture, "is_animated", False))
