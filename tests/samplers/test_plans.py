"""Plans: where noise goes, what adapts and resumes, and how a tree branches."""

import itertools
import json
import math

import pytest
import torch
from torch import Tensor

from samplers import PLANS, All, Calibrated, Decay, Random, Single, Tree, Window


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


def firsts(plan, steps: int, iterations: int, seed: int = 0) -> list[int]:
    return [int(plan.etas(steps, 0.7, i, seed).nonzero()[0]) for i in range(iterations)]


def test_all_can_include_the_last_step() -> None:
    assert All(last=True).etas(1, 0.5, 0, 0).tolist() == [0.5]
    assert All(last=True).etas(3, 0.5, 0, 0).tolist() == [0.5] * 3


def test_the_last_step_can_carry_noise_that_nothing_is_learned_from() -> None:
    plan = All(last="noise")
    assert plan.etas(4, 0.5, 0, 0).tolist() == [0.5] * 4
    assert plan.unlearned == 1 and All().unlearned == All(last=True).unlearned == 0


def test_random_steps_are_drawn_from_their_range_and_repeat_by_seed() -> None:
    def drawn(plan: Random, iterations: int = 60, seed: int = 3) -> list[tuple[int, ...]]:
        steps = [plan.etas(10, 0.7, i, seed).nonzero().flatten().tolist() for i in range(iterations)]
        return [tuple(own) for own in steps]

    plan = Random(size=3, stop=5)
    # every choice of 3 of the 5, neighbours or not
    assert set(drawn(plan, 200)) == set(itertools.combinations(range(5), 3))
    assert drawn(plan) == drawn(plan) != drawn(plan, seed=4)
    assert all(len(set(drawn(Random(size=2, every=4))[i : i + 4])) == 1 for i in range(0, 60, 4))
    assert plan.etas(10, 0.7, 0, 0).unique().tolist() == pytest.approx([0, 0.7])
    with pytest.raises(ValueError, match="do not fit below step 5"):
        Random(size=4, start=2, stop=5).etas(10, 0.7, 0, 0)
    with pytest.raises(ValueError, match="at least"):
        Random(size=0)


def test_every_plan_is_built_by_name() -> None:
    settings = {"tree": {"splits": [0]}}
    for name, plan in PLANS.items():
        etas = plan(**settings.get(name, {})).etas(6, 0.7, 3, 1)
        assert etas.shape == (6,) and etas.dtype == torch.float32 and etas[-1] == 0 and etas.max() > 0


def test_a_window_can_stride_and_hurry() -> None:
    assert firsts(Window(2, order="progressive", stride=3), 10, 4) == [0, 3, 6, 0]
    # 4 places, 7 to 1 iterations at each: MixGRPO's linearly shrinking interval
    stays = Window(2, order="progressive", every=7, every_last=1)
    assert firsts(stays, 6, 17) == [0] * 7 + [1] * 5 + [2] * 3 + [3] + [0]


@pytest.mark.parametrize("settings", [{"stride": 0}, {"every_last": 2}, {"order": "progressive", "every_last": 0}])
def test_impossible_moves_are_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match="window: "):
        Window(**settings)


def test_single_has_one_stochastic_step_drawn_or_in_turn() -> None:
    assert firsts(Single(1, 5, order="cyclic"), 10, 9) == [1, 2, 3, 4, 1, 2, 3, 4, 1]
    drawn = firsts(Single(stop=8), 16, 200)
    assert set(drawn) == set(range(8)) == set(Single(stop=8).places(16))
    assert list(Single().places(10)) == list(range(9))
    for i in range(20):
        assert (Single().etas(10, 0.7, i, 0) > 0).sum() == 1
    with pytest.raises(ValueError, match="do not fit"):
        Single(stop=11).etas(10, 0.7, 0, 0)


def test_decay_is_the_cosine_from_eta_to_its_minimum() -> None:
    etas = Decay(0.1).etas(6, 1.0, 0, 0)
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * k / 4)) / 2 for k in range(5)]
    torch.testing.assert_close(etas, torch.tensor([*expected, 0.0]))
    assert (etas.diff() < 0).all()
    with pytest.raises(ValueError, match="between 0 and eta"):
        Decay(0.5).etas(6, 0.3, 0, 0)
    torch.testing.assert_close(Decay(0.2, stop=3).etas(6, 1.0, 0, 0), torch.tensor([1.0, 0.6, 0.2, 0, 0, 0]))
    for stop in (0, 6):
        with pytest.raises(ValueError, match="1 to 5 carry noise"):
            Decay(stop=stop).etas(6, 1.0, 0, 0)


def gains(*columns: tuple[int, int, int]) -> Tensor:
    """[B, T] with so many positive, negative and zero gains at each step, and a last step without noise."""
    rows = [torch.tensor([1.0] * p + [-1.0] * n + [0.0] * z) for p, n, z in columns]
    return torch.stack([*rows, torch.zeros_like(rows[0])], 1)


def test_calibration_by_the_printed_rule() -> None:
    """Algorithm 1: balanced within e1 = 2 up by e2, else down, of whatever sign."""
    plan = Calibrated(literal=True)
    plan.etas(5, 0.3, 0, 0)
    dense = gains((5, 5, 0), (5, 4, 1), (8, 2, 0), (2, 8, 0))
    for _ in range(3):
        plan.update(dense, torch.ones_like(dense, dtype=torch.bool))
    torch.testing.assert_close(plan.etas(5, 0.3, 1, 0), torch.tensor([0.33, 0.33, 0.27, 0.27, 0.0]))


def test_calibration_lowers_where_gains_are_mostly_negative_only() -> None:
    plan = Calibrated(pool=1)
    plan.etas(6, 0.3, 0, 0)
    # 1.64 standard deviations of 100 coins are 16.4
    dense = gains((50, 50, 0), (42, 58, 0), (41, 59, 0), (80, 20, 0), (0, 0, 100))
    plan.update(dense, torch.ones_like(dense, dtype=torch.bool))
    torch.testing.assert_close(plan.etas(6, 0.3, 1, 0), torch.tensor([0.31, 0.31, 0.29, 0.31, 0.31, 0.0]))


def test_fair_coins_drift_down_under_the_printed_rule_and_not_under_ours() -> None:
    torch.manual_seed(0)
    plans = {literal: Calibrated(literal=literal) for literal in (True, False)}
    for plan in plans.values():
        plan.etas(5, 0.5, 0, 0)
    for _ in range(40):
        dense = torch.randn(24, 5)
        for plan in plans.values():
            plan.update(dense, torch.ones(24, 5, dtype=torch.bool))
    assert plans[True].etas(5, 0.5, 40, 0)[:4].max() < 0.4
    assert plans[False].etas(5, 0.5, 40, 0)[:4].min() > 0.7


def test_calibration_leaves_deterministic_steps_alone_and_keeps_its_bounds() -> None:
    plan = Calibrated(minimum=0.25, maximum=0.33, step=0.03)
    plan.etas(4, 0.3, 0, 0)
    dense = gains((90, 10, 0), (10, 90, 0), (90, 10, 0))
    mask = torch.ones_like(dense, dtype=torch.bool)
    mask[:, 2] = False
    for _ in range(5):
        plan.update(dense, mask)
    torch.testing.assert_close(plan.etas(4, 0.3, 0, 0), torch.tensor([0.33, 0.25, 0.3, 0.0]))


def test_masked_out_samples_are_not_counted() -> None:
    plan = Calibrated(pool=1)
    plan.etas(2, 0.3, 0, 0)
    dense, mask = gains((20, 80, 0)), torch.ones(100, 2, dtype=torch.bool)
    mask[30:, 0] = False
    plan.update(dense, mask)
    assert plan.counts == [[20.0], [10.0]]
    assert plan.etas(2, 0.3, 0, 0)[0] > 0.3


def test_calibration_freezes_after_its_updates() -> None:
    plan = Calibrated(updates=2)
    plan.etas(3, 0.3, 0, 0)
    for _ in range(5):
        plan.update(gains((5, 5, 0), (5, 5, 0)), torch.ones(10, 3, dtype=torch.bool))
    torch.testing.assert_close(plan.etas(3, 0.3, 0, 0), torch.tensor([0.32, 0.32, 0.0]))


def test_calibration_resumes_bit_for_bit_from_plain_json() -> None:
    torch.manual_seed(3)
    batches = [torch.randn(8, 6) - 0.3 for _ in range(8)]
    mask = torch.ones(8, 6, dtype=torch.bool)
    whole, half = Calibrated(), Calibrated()
    for plan in (whole, half):
        plan.etas(6, 0.4, 0, 0)
        for dense in batches[:4]:
            plan.update(dense, mask)
    resumed = Calibrated()
    resumed.load_state_dict(json.loads(json.dumps(half.state_dict())))
    for dense in batches[4:]:
        whole.update(dense, mask)
        resumed.update(dense, mask)
    assert torch.equal(whole.etas(6, 0.4, 8, 0), resumed.etas(6, 0.4, 8, 0))
    assert whole.state_dict() == resumed.state_dict()
    with pytest.raises(ValueError, match="these are the levels of 6 steps, not of 7"):
        resumed.etas(7, 0.4, 8, 0)


@pytest.mark.parametrize("settings", [{"step": 0}, {"pool": 0.5}, {"z": -1}, {"minimum": 0}])
def test_impossible_calibrations_are_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match="calibrated: "):
        Calibrated(**settings)
    with pytest.raises(ValueError, match="outside its bounds"):
        Calibrated(maximum=0.2).etas(4, 0.3, 0, 0)


def test_a_trees_nodes_are_those_of_growing_it_literally() -> None:
    tree, steps = Tree([0, 2, 3], children=3), 6
    paths = [[0]]
    for k in range(steps):
        grown = []
        for path in paths:
            for child in range(3 if k in tree.splits else 1):
                grown.append([*path, path[-1] * (3 if k in tree.splits else 1) + child])
        paths = grown
    assert tree.nodes(steps).tolist() == paths
    assert tree.leaves == 27 and tree.widths(steps) == [1, 3, 3, 9, 27, 27, 27]
    assert tree.forwards(steps) == 1 + 3 + 3 + 9 + 27 + 27


def test_the_published_trees_size() -> None:
    tree = Tree([0, 3, 6, 9])
    assert tree.leaves == 16
    # 13.4 evaluations a leaf in place of 20
    assert tree.forwards(20) == 1 + 2 * 3 + 4 * 3 + 8 * 3 + 16 * 10
    assert tree.memory(20, 1000) == 16 * 41 * 1000 * 4


@pytest.mark.parametrize(
    "settings", [{"splits": []}, {"splits": [3, 1]}, {"splits": [-1]}, {"splits": [1], "children": 1}]
)
def test_impossible_trees_are_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match="tree: "):
        Tree(**settings)


def test_a_split_needs_noise() -> None:
    with pytest.raises(ValueError, match="last stochastic step is 4"):
        Tree([5]).etas(6, 0.7, 0, 0)
    assert Tree([4]).etas(6, 0.7, 0, 0)[4] > 0


def test_a_window_that_moves_by_rule_is_not_drawn_for_each_group() -> None:
    assert Window(order="random", of="group").of == "group"
    with pytest.raises(ValueError, match="of: group goes with order: random"):
        Window(order="progressive", of="group")
