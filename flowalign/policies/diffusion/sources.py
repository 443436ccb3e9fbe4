"""Opening the pictures that samples are made from."""

from PIL import ImageOps
from PIL.Image import Image

from flowalign.data import Source
from rewards.pictures import read_picture


def opened(source: Source, size: tuple[int, int] | None) -> tuple[list[Image], Image | None]:
    """The pictures and the mask of a source, cut to width and height around their middle."""
    pictures = []
    for name in [*source.images, *([] if source.mask is None else [source.mask])]:
        picture = read_picture(name)
        pictures.append(picture if size is None else ImageOps.fit(picture, size))
    return pictures[: len(source.images)], None if source.mask is None else pictures[-1].convert("L")
