"""Plans say which steps are stochastic."""

import pytest
import torch

from samplers import PLANS, All, Window


def places(plan: Window, steps: int, iteration: int, seed: int = 0) -> list[int]:
    return plan.etas(steps, 0.7, iteration, seed).nonzero().flatten().tolist()


def test_all_steps_but_the_last() -> None:
    assert All().etas(4, 0.5, 0, 0).tolist() == [0.5, 0.5, 0.5, 0.0]


def test_a_fixed_window_stays() -> None:
    assert [places(Window(size=2, start=1), 6, i) for i in (0, 1, 99)] == [[1, 2]] * 3


def test_a_progressive_window_slides_and_starts_over() -> None:
    plan = Window(size=2, start=0, order="progressive", every=2)
    firsts = [places(plan, 5, i)[0] for i in range(8)]
    assert firsts == [0, 0, 1, 1, 2, 2, 0, 0]


def test_a_random_window_moves_within_its_range_and_repeats_by_seed() -> None:
    plan = Window(size=1, start=1, stop=5, order="random", every=3)
    drawn = [places(plan, 10, i, seed=4)[0] for i in range(90)]
    assert set(drawn) == {1, 2, 3, 4}
    assert all(len(set(drawn[i : i + 3])) == 1 for i in range(0, 90, 3))
    assert drawn == [places(plan, 10, i, seed=4)[0] for i in range(90)]
    assert drawn != [places(plan, 10, i, seed=5)[0] for i in range(90)]


@pytest.mark.parametrize("name", ["all", "window"])
def test_no_plan_puts_noise_on_the_last_step(name: str) -> None:
    for steps in (3, 10):
        for iteration in range(20):
            etas = PLANS[name]().etas(steps, 0.7, iteration, 0)
            assert etas.shape == (steps,) and etas.dtype == torch.float32
            assert etas[-1] == 0 and (etas > 0).any()


@pytest.mark.parametrize("plan", [Window(size=5), Window(size=2, start=3), Window(size=1, stop=5)])
def test_a_window_that_does_not_fit_is_refused(plan: Window) -> None:
    with pytest.raises(ValueError, match="do not fit below step"):
        plan.etas(5, 0.7, 0, 0)


@pytest.mark.parametrize("settings", [{"size": 0}, {"start": -1}, {"every": 0}])
def test_a_window_with_impossible_settings_is_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match="at least"):
        Window(**settings)
