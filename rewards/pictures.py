"""The one place that opens files of pictures, which may be anybody's: what comes out is RGB, upright and 8 bits."""

import os
import stat
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps


class PictureError(ValueError):
    """A file that is not opened as a picture; the message names it and says why."""


def read_picture(file: str | Path) -> Image.Image:
    """The picture in a file, turned as its EXIF says; of an animated one the first frame.

    16 bits of grey become 8; other depths, and numbers that are not finite, are refused: what they would mean as
    colours is anybody's guess.

    Returns:
        [height, width] in RGB.

    Raises:
        PictureError: there is no such plain file, it cannot be read as a picture, or not as colours.
    """
    try:
        # a pipe would be waited for
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise PictureError(f"{file} is no file, and a picture is one")
        with Image.open(file) as opened:
            upright = ImageOps.exif_transpose(opened)
        if upright.mode.startswith("I;16"):
            return Image.fromarray((np.asarray(upright).astype(np.uint32) // 257).astype(np.uint8)).convert("RGB")
        if upright.mode in ("I", "F"):
            raise PictureError(
                f"{file} has values of 32 bits, which are no colours; save it with 8 or 16 bits a channel"
            )
        return upright.convert("RGB")
    except PictureError:
        raise
    except FileNotFoundError as error:
        raise PictureError(f"no picture at {file}") from error
    except Exception as error:
        # Pillow's readers raise errors of all kinds at damaged files
        said = " ".join(str(error).split())[:120]
        raise PictureError(f"{file} cannot be read as a picture: {said}") from error
