"""Where an iteration's trajectories wait for the updates: `rollout.store`."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from flowalign.errors import ConfigError, FlowalignError
from samplers.stored import Allocate, in_memory


class InFiles:
    """Makes tensors in files of a folder.

    A file loses its name before anything is written to it. So the system frees it with its tensor, or with the process,
    and a run that was killed leaves none.

    Args:
        folder: folder of the files; made where it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An empty tensor.

        Raises:
            FlowalignError: the disk is full.
        """
        count = torch.Size(shape).numel()
        if not count:
            return in_memory(shape, dtype)
        self.folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix="trajectories-", dir=self.folder)
        try:
            # a file with holes would end the process in the middle of a write, without a word
            os.posix_fallocate(handle, 0, count * dtype.itemsize)
            return torch.from_file(name, shared=True, size=count, dtype=dtype).view(list(shape))
        except OSError as error:
            raise FlowalignError(
                f"rollout.store: {count * dtype.itemsize / 2**30:.2f} GiB of trajectories do not go to {self.folder}: "
                f"{os.strerror(error.errno or 0)}; another disk as output, or store: host works"
            ) from error
        finally:
            os.close(handle)
            os.unlink(name)


def allocator(store: Literal["device", "host", "disk"], folder: Path) -> Allocate | None:
    """Memory for trajectories; None where they stay on the device.

    Args:
        folder: the run's.
    """
    if store == "disk" and not hasattr(os, "posix_fallocate"):
        raise ConfigError("rollout.store: this system cannot reserve room for a file, as Linux does; store: host works")
    return {"device": None, "host": in_memory, "disk": InFiles(folder)}[store]
