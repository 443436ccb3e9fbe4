"""Signal and noise beside those that gradients were drawn with."""

import numpy as np
import pytest

from flowalign.evaluation.gradient_noise import gradient_noise, step_gain


def test_signal_over_noise_is_the_one_that_was_drawn() -> None:
    """Parts of 4 groups, whose noise has the variance 1 in each of 400 directions; an update has 32 groups."""
    rng, truth = np.random.default_rng(0), 0.5
    # |G|^2 = truth times the noise of an update: 400 * 4 / 32
    signal = np.full(400, (truth * 400 * 4 / 32 / 400) ** 0.5)
    found = [gradient_noise(signal + rng.normal(size=(8, 400)), 32, 4) for _ in range(200)]
    assert np.mean([one.signal.mean for one in found if one]) == pytest.approx(truth, abs=0.05)
    held = sum((one.signal.low or 0) <= truth <= (one.signal.high or 0) for one in found if one)
    assert 180 <= held <= 200
    # halves of 16 groups: |G|^2 over |G|^2 and the noise of 16 groups, E|e|^2 times 2
    cosine = truth / (truth + 2)
    held = sum((one.cosine.low or 0) <= cosine <= (one.cosine.high or 0) for one in found if one)
    assert 180 <= held <= 200
    scale = found[0].scale if found[0] else None
    assert scale is not None and scale.low is not None and scale.low < 64 < (scale.high or np.inf)


def test_noise_alone_is_no_signal_and_no_gradient_is_none() -> None:
    rng = np.random.default_rng(1)
    found = gradient_noise(rng.normal(size=(8, 1000)), 32, 4)
    assert found is not None and (found.signal.low or 0) < 0 < (found.signal.high or 0)
    assert found.scale.high is None
    assert gradient_noise(np.zeros((8, 10)), 32, 4) is None


def test_a_step_lowers_the_loss_by_the_size_of_the_gradient() -> None:
    gradients = np.tile([3.0, -2.0, 0.0], (4, 1))
    assert step_gain(gradients, 0.01).mean == pytest.approx(0.05)
    rng = np.random.default_rng(0)
    # of 200 draws of noise 190 have 0 in the interval
    noise = [step_gain(rng.normal(size=(8, 1000)), 0.01) for _ in range(200)]
    assert 180 <= sum((one.low or 0) < 0 < (one.high or 0) for one in noise) <= 199
