"""A tensor whose rows are in the host's memory or in a file, and visit the device when they are asked for."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only

Allocate = Callable[[Sequence[int], torch.dtype], Tensor]
"""Makes an empty tensor of this shape and dtype, on the CPU."""


def in_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An empty tensor in the host's memory."""
    return torch.empty(list(shape), dtype=dtype)


def _pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    # the GPU copies from pinned memory while it computes
    return torch.empty(list(shape), dtype=dtype, pin_memory=True)


class Stored:
    """A tensor [B, ...] or [B, K, ...] that is on the host; what it is indexed for comes as a tensor on the device.

    Its values are copied there and back bit for bit. An index of the device makes the host wait for it, unless what
    will be asked for was named before, by `fetch`, and is on the device already.

    Args:
        parts: tensors of the CPU, one after the other along the first axis.
        device: device of what it is indexed for.
        allocate: makes the memory of copies.
    """

    def __init__(self, parts: Sequence[Tensor], device: torch.device, allocate: Allocate) -> None:
        self.parts, self.device, self.allocate = list(parts), device, allocate
        self.ends = torch.tensor([len(part) for part in parts]).cumsum(0)
        self.shape = torch.Size([int(self.ends[-1]), *parts[0].shape[1:]])
        self.dtype = parts[0].dtype
        self._coming: _Fetched | None = None
        self._held: _Fetched | None = None

    @classmethod
    def of(cls, value: Tensor, allocate: Allocate) -> Self:
        """A tensor, moved to the host."""
        return cls([allocate(value.shape, value.dtype).copy_(value)], value.device, allocate)

    def __len__(self) -> int:
        return self.shape[0]

    def dim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        return self.shape.numel() * self.dtype.itemsize

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        # torch's functions get all of it on the device
        return func(*tree_map_only(Stored, Stored.whole, args), **tree_map_only(Stored, Stored.whole, kwargs or {}))

    def __getitem__(self, index: object) -> Tensor:
        index = index if isinstance(index, tuple) else (index,)
        if self._held is not None and all(isinstance(each, Tensor) for each in index):
            return self._held.rows(self._numbers(*index))
        return self._gathered(index).to(self.device)

    def __setitem__(self, index: object, value: Tensor) -> None:
        value = value.to("cpu", self.dtype)
        for part, own, at in self._located(index if isinstance(index, tuple) else (index,)):
            part[own] = value[at]

    def take(self, rows: Tensor | Sequence[int] | slice) -> "Stored":
        """These rows, on the host."""
        return Stored([self._gathered((rows,), self.allocate)], self.device, self.allocate)

    def piece(self, begin: int, end: int) -> "Stored":
        """Neighbouring rows, in the same memory."""
        starts = [0, *self.ends.tolist()]
        pieces = [part[max(begin - start, 0) : max(end - start, 0)] for part, start in zip(self.parts, starts)]
        return Stored([each for each in pieces if len(each)], self.device, self.allocate)

    @staticmethod
    def cat(pieces: Sequence["Stored"]) -> "Stored":
        """One after the other, in the same memory."""
        first = pieces[0]
        return Stored([part for piece in pieces for part in piece.parts], first.device, first.allocate)

    def padded(self, length: int) -> "Stored":
        """With zeros at the end of the second axis, up to this length."""
        if self.shape[1] == length:
            return self
        missing = [0, 0] * (self.dim() - 2) + [0, length - self.shape[1]]
        return Stored([self._copy(pad(part, missing)) for part in self.parts], self.device, self.allocate)

    def clone(self) -> "Stored":
        """A copy on the host."""
        return Stored([self._copy(part) for part in self.parts], self.device, self.allocate)

    def whole(self) -> Tensor:
        """All of it on the device."""
        return self[:]

    def fetch(self, *index: Tensor) -> None:
        """Begin to copy what will be asked for after the next `hold`.

        Args:
            index: [N] rows, or [N] rows and [N] places on the second axis, on the host.
        """
        numbers = self._numbers(*index).unique()
        depth = self.shape[1] if len(index) == 2 else 1
        wanted = (numbers // depth, numbers % depth)[: len(index)]
        self._coming = _Fetched(numbers, self._gathered(wanted, _pinned), self.device)

    def hold(self) -> None:
        """From now on answer indices of tensors by what was fetched last, and by nothing else; all, if nothing was."""
        self._held, self._coming = self._coming, None
        if self._held is not None:
            self._held.wait()

    def _numbers(self, rows: Tensor, places: Tensor | None = None) -> Tensor:
        return rows if places is None else rows * self.shape[1] + places

    def _gathered(self, index: tuple[Any, ...], allocate: Allocate = in_memory) -> Tensor:
        located = list(self._located(index))
        part, own, _ = located[0]
        count = sum(len(at) for _, _, at in located)
        gathered = allocate([count, *part[own].shape[1:]], self.dtype)
        for part, own, at in located:
            gathered[at] = part[own]
        return gathered

    def _located(self, index: tuple[Any, ...]) -> Iterator[tuple[Tensor, tuple[Any, ...], Tensor]]:
        """Each part that an index is about, the index into it, and the places [n] of its rows in the result."""
        first, *rest = (each.cpu() if isinstance(each, Tensor) else each for each in index)
        rows = torch.arange(len(self))[first]
        owners = torch.bucketize(rows, self.ends, right=True)
        for owner in owners.unique().tolist() or [0]:
            at = (owners == owner).nonzero()[:, 0]
            part = self.parts[owner]
            own = rows[at] - (int(self.ends[owner]) - len(part))
            yield part, (own, *(each[at] if isinstance(each, Tensor) else each for each in rest)), at

    def _copy(self, value: Tensor) -> Tensor:
        return self.allocate(value.shape, value.dtype).copy_(value)


class _Fetched:
    """Rows that are on their way to the device.

    Args:
        numbers: [M] what they are known by, rising, on the host.
        values: [M, ...] on the host.
    """

    def __init__(self, numbers: Tensor, values: Tensor, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        with torch.cuda.stream(self.stream) if self.stream is not None else nullcontext():
            self.numbers = numbers.pin_memory().to(device, non_blocking=True)
            self.values = values.to(device, non_blocking=True)

    def wait(self) -> None:
        """Let the device's work that comes next begin when they are there."""
        if self.stream is not None:
            present = torch.cuda.current_stream(self.values.device)
            present.wait_stream(self.stream)
            for tensor in (self.numbers, self.values):
                tensor.record_stream(present)

    def rows(self, numbers: Tensor) -> Tensor:
        """[N, ...] those of these numbers."""
        places = torch.searchsorted(self.numbers, numbers).clamp(max=len(self.numbers) - 1)
        there = (self.numbers[places] == numbers).all()
        torch._assert_async(there, "a loss read states of a rollout that its algorithm's `reads` does not name")
        return self.values[places]
