"""Noise that depends on the sample's own seed only, not on the batch, the device or the number of processes."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from samplers.devices import is_gpu


def derive_seed(*key: int) -> int:
    """A well-mixed 32-bit seed for a tuple of non-negative integers such as (run seed, iteration, sample)."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


def generators(seeds: Sequence[int]) -> list[torch.Generator]:
    """One CPU generator a sample. diffusers pipelines take the list as `generator=`, with the same noise."""
    return [torch.Generator("cpu").manual_seed(seed) for seed in seeds]


def normal(
    shape: Sequence[int],
    sources: Sequence[torch.Generator],
    device: torch.device | str,
    asked: Sequence[bool] | None = None,
) -> Tensor:
    """[B, *shape] float32 standard normal; row b is drawn from sources[b] on the CPU and moved to the device.

    Args:
        asked: rows that are drawn; the others are 0 and take nothing from their source. Default all.
    """
    noise = torch.zeros(len(sources), *shape, pin_memory=is_gpu(device))
    for row, source, drawn in zip(noise, sources, asked or [True] * len(sources), strict=True):
        if drawn:
            row.normal_(generator=source)
    return noise.to(device, non_blocking=True)


def fingerprints(rows: Tensor) -> Tensor:
    """[B] 64-bit hashes of the float32 bits of rows [B, ...]: equal rows have equal ones, on any device."""
    size = rows[0].numel()
    # products and sums wrap around at 2^64, and odd factors lose nothing
    place = torch.arange(1, size + 1, device=rows.device) * 0x5851F42D4C957F2D
    factor = ((place ^ (place >> 31)) * 0x14057B7EF767814F) | 1
    hashes = [(row.float().contiguous().view(torch.int32).flatten().long() * factor).sum() for row in rows]
    return torch.stack(hashes)
