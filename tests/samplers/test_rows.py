"""Records of samples: some of them taken, several joined."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from samplers.rows import SHARED, Rows


@dataclass
class Inner(Rows):
    x: Tensor


@dataclass
class Record(Rows):
    x: Tensor
    names: list[str]
    parts: dict[str, Tensor]
    inner: Inner
    levels: Tensor = field(metadata=SHARED)
    function: Callable[[float], float]
    pictures: list[str] = field(default_factory=list)
    nodes: Tensor | None = None


def record(first: int, count: int) -> Record:
    x = torch.arange(first, first + count)
    return Record(x, [str(i) for i in x.tolist()], {"p": x * 2}, Inner(x * 3), torch.tensor([1.0, 0.0]), abs)


@pytest.mark.parametrize("rows", [torch.tensor([2, 0, 2]), [2, 0, 2]])
def test_taken_rows_are_the_same_in_every_field(rows: Tensor | list[int]) -> None:
    some = record(0, 4)[rows]
    assert some.x.tolist() == [2, 0, 2] and some.names == ["2", "0", "2"] and len(some) == 3
    assert some.parts["p"].tolist() == [4, 0, 4] and some.inner.x.tolist() == [6, 0, 6]
    assert some.levels.tolist() == [1.0, 0.0] and some.function is abs
    assert some.pictures == [] and some.nodes is None


def test_a_slice_takes_rows_and_given_fields_stay() -> None:
    assert record(0, 4)[1:3].names == ["1", "2"]
    assert record(0, 4).take([1], inner=Inner(torch.tensor([7]))).inner.x.tolist() == [7]


def test_joined_parts_are_the_whole() -> None:
    joined, whole = Record.cat([record(0, 1), record(1, 3)]), record(0, 4)
    assert joined.names == whole.names and joined.x.tolist() == whole.x.tolist()
    assert joined.parts["p"].tolist() == whole.parts["p"].tolist()
    assert joined.inner.x.tolist() == whole.inner.x.tolist() and joined.levels.tolist() == [1.0, 0.0]


def test_tensors_move_and_the_rest_stays() -> None:
    there = record(0, 2).to("meta")
    assert there.x.device.type == "meta" and there.names == ["0", "1"]
