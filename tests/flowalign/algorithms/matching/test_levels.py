"""The noise levels that the matching family learns at."""

import pytest
import torch

from flowalign.algorithms.matching.levels import logit_normal, schedule, uniform
from flowalign.config import load, recipe
from flowalign.errors import ConfigError


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_points_of_the_schedule_are_different_and_random() -> None:
    draws = torch.stack([schedule(10, generator(seed)) for seed in range(400)])
    assert draws.shape == (400, 9)
    assert all(len(set(row)) == 9 for row in draws.tolist())
    # each point is left out equally often
    assert (draws.flatten().bincount(minlength=10) / 400 - 0.9).abs().max() < 0.06
    some = torch.stack([schedule(14, generator(seed), count=6, first=1, end=12) for seed in range(200)])
    assert some.min() == 1 and some.max() == 11


def test_stratified_points_are_one_of_each_part() -> None:
    draws = torch.stack(
        [schedule(14, generator(seed), count=3, first=1, end=13, stratified=True) for seed in range(99)]
    )
    for part in range(3):
        assert set(draws[:, part].tolist()) == set(range(1 + 4 * part, 5 + 4 * part))


def test_uniform_levels_are_one_in_each_part_of_the_interval() -> None:
    draws = torch.stack([uniform(1, generator(seed), count=4, low=0.2, high=1.0) for seed in range(300)])
    bounds = torch.linspace(0.2, 1.0, 5)
    assert (draws > bounds[:-1]).all() and (draws < bounds[1:]).all()
    assert (draws.mean(0) - (bounds[1:] + bounds[:-1]) / 2).abs().max() < 0.01


def test_logit_normal_levels_are_the_logistic_function_of_a_normal_and_shift_as_sd3s() -> None:
    draws = logit_normal(1, generator(), count=20_000, stratified=False).double()
    normal = torch.distributions.Normal(0.0, 1.0)
    quantiles = normal.cdf((draws / (1 - draws)).log()).sort().values
    assert (quantiles - torch.linspace(0, 1, len(quantiles))).abs().max() < 0.015
    # SD3's weighting scheme with mean 0 and deviation 1: 68.3% of the levels within a deviation of the middle
    within = (draws > torch.sigmoid(torch.tensor(-1.0))) & (draws < torch.sigmoid(torch.tensor(1.0)))
    assert within.double().mean() == pytest.approx(0.683, abs=0.01)
    shifted = logit_normal(1, generator(), count=20_000, stratified=False, shift=3.0).double()
    torch.testing.assert_close(shifted, 3 * draws / (1 + 2 * draws), atol=1e-6, rtol=0)


def test_levels_that_a_schedule_has_not_are_refused() -> None:
    config = load(recipe("tiny_sd3/nft"), ["algorithm.levels={name: schedule, count: 7}"])
    with pytest.raises(ConfigError, match="7 points of the schedule cannot be drawn from its steps 0 to 4"):
        config.check(processes=1)


def test_how_many_levels_a_picture_of_the_data_has_is_said_in_one_place() -> None:
    config = load(recipe("tiny_sd3/sft"), ["algorithm.levels={name: schedule, count: 2}"])
    with pytest.raises(ConfigError, match="levels.count: a line of the data has training.group_size levels"):
        config.check(processes=1)
