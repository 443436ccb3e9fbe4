"""What moves weights, on a single number."""

import pytest
import torch
from torch import nn

from flowalign.config.sections import Optimizer
from flowalign.training.optimization import Optimization

CPU = torch.device("cpu")


def test_the_average_takes_every_nth_update_with_the_decay_of_its_number() -> None:
    """By flow_grpo's rule: decay min((1 + t) / (10 + t), 0.9) at update t + 1."""
    weight = nn.Parameter(torch.zeros(()))
    moved = Optimization([{"weight": weight}], Optimizer(), 100, CPU, ema_decay=0.9, ema_every=3)
    expected = 0.0
    for update in range(1, 101):
        moved.optimizer.step = lambda: None  # type: ignore[method-assign]
        weight.data.fill_(float(update))
        weight.grad = torch.zeros(())
        moved.step()
        if update % 3 == 0:
            decay = min(update / (9 + update), 0.9)
            expected = decay * expected + (1 - decay) * update
        assert moved.ema is not None
        (shadow,) = moved.ema.shadow_params
        assert shadow.item() == pytest.approx(expected)
        assert moved.ema.optimization_step == update
