"""The processes of a run: rows, which have different groups, and columns, which share the tokens of each sample."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flowalign.policies.settings import ContextParallel
from samplers import derive_seed

T = TypeVar("T")


class Processes:
    """A table of processes. Each row has its own groups; the columns of a row have the same samples, and divide their
    tokens.

    Without context parallelism there is one column, and a row is a process.

    Args:
        settings: settings that give the number of columns.
    """

    def __init__(self, accelerator: Accelerator, settings: ContextParallel | None = None) -> None:
        self.accelerator, self.device = accelerator, accelerator.device
        self.settings = settings or ContextParallel()
        self.columns = self.settings.degree
        self.rows = accelerator.num_processes // self.columns
        self.row, self.column = divmod(accelerator.process_index, self.columns)
        self.exchanges = 0
        """Number of exchanges so far, in each of which processes wait for each other."""
        self.apart = False
        """True while this process works by itself: nothing is exchanged."""

    def seed(self, seed: int, iteration: int) -> None:
        """Seed torch for an iteration: a resumed run draws the same numbers as one without the interruption."""
        torch.manual_seed(derive_seed(seed, iteration, self.row))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Context in which this process exchanges nothing with the others."""
        self.apart = True
        try:
            yield
        finally:
            self.apart = False

    @cached_property
    def mesh(self) -> DeviceMesh:
        """Mesh of rows x ring x ulysses, as diffusers needs it; all processes make it together."""
        shape = self.rows, self.settings.ring, self.settings.ulysses
        return init_device_mesh(self.accelerator.device.type, shape, mesh_dim_names=("rows", "ring", "ulysses"))

    @cached_property
    def _of_row(self) -> torch.distributed.ProcessGroup:
        return self.mesh["ring", "ulysses"]._flatten().get_group()

    def gather(self, values: Tensor) -> Tensor:
        """Gather rows [B, ...] of all processes, in the order in which one process would have them."""
        if self.apart:
            return values
        self.exchanges += 1
        gathered = self.accelerator.gather(values.contiguous())
        if self.columns == 1:
            return gathered
        return gathered.unflatten(0, (self.rows, self.columns, -1))[:, 0].flatten(0, 1)

    def own(self, values: Tensor, rows: int) -> Tensor:
        """This process's rows of gathered values."""
        return values[self.row * rows : (self.row + 1) * rows]

    def maximum(self, count: int) -> int:
        """The maximum of a number over the processes."""
        if self.apart:
            return int(count)
        self.exchanges += 1
        return int(self.accelerator.gather(torch.tensor([count], device=self.device)).max())

    def gather_objects(self, values: list[Any]) -> list[Any]:
        """Join the lists of all rows."""
        self.exchanges += 1
        gathered: list[Any] = gather_object(values if self.column == 0 else [])
        return gathered

    def once(self, work: Callable[[], T]) -> T:
        """Do work in the first process of a row, for the whole row: a judge is queried once, and all get its answer."""
        if self.columns == 1 or self.apart:
            return work()
        self.exchanges += 1
        answer = [work() if self.column == 0 else None]
        torch.distributed.broadcast_object_list(answer, src=self.row * self.columns, group=self._of_row)
        return answer[0]  # type: ignore[return-value]
