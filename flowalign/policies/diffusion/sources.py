"""The pictures that samples are made from: which a pipeline takes, and how they are brought to its size."""

from collections.abc import Iterator, Sequence
from typing import Any

from diffusers import DiffusionPipeline
from PIL import ImageOps
from PIL.Image import Image

from flowalign.data import Source
from flowalign.errors import ConfigError
from flowalign.policies.diffusion.families import Family
from rewards.pictures import read_picture


def opened(source: Source, size: tuple[int, int] | None) -> tuple[list[Image], Image | None]:
    """The pictures and the mask of a source, cut to width and height around their middle."""
    pictures = []
    for name in [*source.images, *([] if source.mask is None else [source.mask])]:
        picture = read_picture(name)
        pictures.append(picture if size is None else ImageOps.fit(picture, size))
    return pictures[: len(source.images)], None if source.mask is None else pictures[-1].convert("L")


def check_sources(
    pipeline: DiffusionPipeline,
    family: Family,
    sources: Sequence[Source | None] | None,
    prompts: Sequence[str],
    call: dict[str, Any],
) -> list[Source | None]:
    """The pictures of each sample; a pipeline that takes none is given none.

    Raises:
        ConfigError: a number of pictures or a mask that this pipeline does not take, or no size to bring them to.
    """
    fewest, most = family.images
    if not most or sources is None:
        sources = [None] * len(prompts)
    name = type(pipeline).__name__
    counts = [0 if source is None else len(source.images) for source in sources]
    for source, count, prompt in zip(sources, counts, prompts, strict=True):
        if not fewest <= count <= most:
            takes = "one picture" if most == 1 else f"{fewest} to {most} pictures"
            raise ConfigError(
                f"{name} takes {takes} a sample: 'image' in the line of the prompt {prompt!r}, or --image"
            )
        if source is not None and family.takes_mask != (source.mask is not None):
            wants = "needs a" if family.takes_mask else "takes no"
            raise ConfigError(f"{name} {wants} 'mask' in the line of the prompt {prompt!r}, or --mask")
        if count != counts[0]:
            raise ConfigError(f"the prompt {prompt!r} has {count} pictures and another {counts[0]}; give all as many")
    if counts and counts[0] and not {"height", "width"} <= call.keys():
        raise ConfigError(f"{name} makes samples from pictures; set the height and width to bring them to")
    return list(sources)


def runs(sources: Sequence[Any], longest: int) -> Iterator[slice]:
    """Neighbours with equal sources, which one call of a pipeline can make."""
    start = 0
    for i in range(1, len(sources) + 1):
        if i == len(sources) or i - start == longest or sources[i] != sources[start]:
            yield slice(start, i)
            start = i
