"""What moves weights, on a single number."""

import pytest
import torch
from torch import Tensor, nn

from flowalign.config.sections import Optimizer
from flowalign.errors import FlowalignError
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


def test_gradients_below_float16_survive_and_what_exceeds_it_lowers_the_scale() -> None:
    weight = nn.Parameter(torch.ones(()))
    moved = Optimization([{"weight": weight}], Optimizer(learning_rate=0.1), 10, CPU, half=True)
    factor = 1e-9

    def losses(items: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return factor * (weight.half() * items).float(), {}

    def update() -> float:
        moved.backward(losses, torch.ones(1), 1, 1)
        return moved.step().item()

    assert update() == pytest.approx(1e-9, rel=1e-3)
    factor, before = 10.0, weight.item()
    assert moved.scale is not None
    for scale in (2**15, 2**14, 2**13, 2**12):
        # 10 times the scale was above float16's largest number
        assert update() == torch.inf and moved.scale.value == scale
    assert weight.item() == before
    assert update() == pytest.approx(10) and weight.item() < before


def test_losses_that_are_not_finite_still_end_a_run_in_float16() -> None:
    weight = nn.Parameter(torch.ones(()))
    moved = Optimization([{"weight": weight}], Optimizer(), 10, CPU, half=True)
    with pytest.raises(FlowalignError, match="5 updates in a row were skipped: the losses are not finite"):
        for _ in range(5):
            moved.backward(lambda items: (weight * items * torch.nan, {}), torch.ones(1), 1, 1)
            moved.step()
    assert weight.item() == 1
