"""Aggregation against loops."""

import pytest
import torch
from torch import Tensor

from flowalign.core.aggregation import Aggregation, action_weights

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]]).bool()


def aggregated(losses: Tensor, mask: Tensor, aggregation: Aggregation, length: int | None = None) -> Tensor:
    return (losses.where(mask, 0) * action_weights(mask, aggregation, length)).sum()


def test_aggregations_by_loops() -> None:
    losses = torch.randn(6, 4)
    rows = [[losses[b, t].item() for t in range(4) if MASK[b, t]] for b in range(6)]
    everything = [x for row in rows for x in row]
    expected = {
        "token": sum(everything) / len(everything),
        "sequence": sum(sum(row) / len(row) for row in rows) / 6,
        "sum": sum(everything) / 6,
        "constant": sum(everything) / 6 / 9,
    }
    for name, value in expected.items():
        assert aggregated(losses, MASK, name, length=9).item() == pytest.approx(value, rel=1e-5)


def test_an_empty_row_weighs_nothing_but_counts() -> None:
    mask = torch.tensor([[True, True], [False, False]])
    losses = torch.tensor([[1.0, 3.0], [torch.nan, torch.inf]])
    assert aggregated(losses, mask, "sequence").item() == 1.0
    assert aggregated(losses, mask, "token").item() == 2.0
