"""What waits on the host for an update, copied to the device a micro-batch ahead."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flowalign.algorithms.base import Algorithm
from samplers.devices import is_gpu
from samplers.stored import Stored


def visiting(algorithm: Algorithm, experience: object, micro_batches: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield micro-batches of items; while one is learned from, what the next one reads is copied to the device."""
    waiting = next(iter(algorithm.reads(experience, micro_batches[0])), None)
    if waiting is None or not is_gpu(micro_batches[0].device):
        yield from micro_batches
        return
    known: dict[int, Stored] = {}

    def fetch(items: Tensor) -> None:
        indices: dict[int, list[tuple[Tensor, ...]]] = {}
        for stored, index in algorithm.reads(experience, items):
            known[id(stored)] = stored
            indices.setdefault(id(stored), []).append(index)
        for key, several in indices.items():
            known[key].fetch(*(torch.cat(each) for each in zip(*several, strict=True)))

    # the host waits once, not for every micro-batch
    on_host = torch.cat(list(micro_batches)).cpu().split([len(items) for items in micro_batches])
    fetch(on_host[0])
    for number, items in enumerate(micro_batches, 1):
        for stored in known.values():
            stored.hold()
        if number < len(micro_batches):
            fetch(on_host[number])
        yield items
    for stored in known.values():
        stored.hold()
