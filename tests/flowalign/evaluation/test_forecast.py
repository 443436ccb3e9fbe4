"""Forecasts beside the curves that the points were drawn from."""

import numpy as np
import pytest

from flowalign.errors import ConfigError
from flowalign.evaluation.forecast import FEWEST, forecast

TIMES = [20.0 * i for i in range(9)]


def curve(iteration: float) -> float:
    return 0.9 - 0.4 * float(np.exp(-iteration / 60))


def test_a_curve_without_noise_is_continued() -> None:
    found = forecast(TIMES, [curve(iteration) + 1e-6 * (-1) ** i for i, iteration in enumerate(TIMES)])
    assert found is not None
    # the grid of tau has steps of some percent
    assert found.at(320).mean == pytest.approx(curve(320), abs=3e-3)
    assert found.level().mean == pytest.approx(0.9, abs=3e-3) and found.tells(found.level())
    assert found.reached(0.8).mean == pytest.approx(60 * np.log(4), rel=0.02)
    assert np.isinf(found.reached(0.95).low or 0) and found.reached(0.4).mean == 0


def test_the_interval_holds_what_comes() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(60):
        found = forecast(TIMES, [curve(iteration) + rng.normal() * 0.02 for iteration in TIMES], most=1)
        assert found is not None
        end = found.at(320)
        hits += (end.low or 0) <= curve(320) + rng.normal() * 0.02 <= (end.high or 0)
    # 57 of 60
    assert hits >= 53


def test_few_points_and_flat_ones_tell_nothing_and_a_line_has_no_plateau() -> None:
    assert forecast(TIMES[: FEWEST - 1], [0.1, 0.2, 0.3, 0.2, 0.4]) is None and forecast(TIMES, [0.5] * 9) is None
    rng = np.random.default_rng(0)
    line = forecast(TIMES, [0.2 + 0.002 * t + rng.normal() * 0.03 for t in TIMES])
    assert line is not None and not line.tells(line.level())
    with pytest.raises(ConfigError, match="above the largest one of 0.3"):
        forecast(TIMES, [curve(iteration) + rng.normal() * 0.01 for iteration in TIMES], most=0.3)
