"""Shares of rewards beside closed forms, and the weights for given shares beside their equation."""

import json
from pathlib import Path

import numpy as np
import pytest

from flowalign.app.cli.main import main
from flowalign.config import load, recipe
from flowalign.config.rewards import build_rewards
from flowalign.data import Prompts
from flowalign.errors import ConfigError
from flowalign.evaluation.calibration import calibrate, figures, shares_of, weights_for
from flowalign.training.building import build_policy

TWO = "rewards=[{name: shapes, strict_weight: 0.5}, {name: tiny_clip}]"


def drawn(seed: int, groups: int = 60, size: int = 8) -> dict[str, list[float]]:
    """Independent rewards with standard deviations 1 and 3 in a group, and the difference of prompts in both."""
    rng = np.random.default_rng(seed)
    prompt = rng.normal(0, 10, (groups, 1))
    return {name: (prompt + rng.normal(0, std, (groups, size))).ravel().tolist() for name, std in (("a", 1), ("b", 3))}


def test_shares_are_of_the_variance_within_groups() -> None:
    many = figures(drawn(0, 4000), [1.0, 1.0], 8)
    a, b = many.scales.values()
    assert (a.within, b.within, a.between) == pytest.approx((1, 3, 10), rel=0.03)
    assert (a.share.mean, b.share.mean) == pytest.approx((0.1, 0.9), abs=0.01)
    assert a.share.mean + b.share.mean == pytest.approx(1, abs=1e-12)
    assert many.ends[0, 0, 1] < 0 < many.ends[1, 0, 1] and not a.bounded
    assert abs(many.correlation[0, 1]) < 0.02 and abs(a.tail) < 0.1 and a.dead == 0
    # a third of the weight makes them equal
    assert figures(drawn(0, 4000), [3.0, 1.0], 8).scales["a"].share.mean == pytest.approx(0.5, abs=0.02)


def test_intervals_hold_the_true_share() -> None:
    found = [figures(drawn(seed), [1.0, 1.0], 8).scales["a"].share for seed in range(60)]
    # 95% of 60 are 57; fewer than 52 come once in a hundred times
    assert sum(own.low <= 0.1 <= own.high for own in found if own.low is not None and own.high is not None) >= 52


def test_a_reward_that_is_outvoted_has_a_share_below_0() -> None:
    covariance = np.array([[1.0, -2.0], [-2.0, 9.0]])
    assert shares_of(covariance, np.ones(2)).tolist() == pytest.approx([-1 / 6, 7 / 6])


def test_weights_solve_their_equation() -> None:
    rng = np.random.default_rng(1)
    for count in (2, 3, 6):
        root = rng.normal(size=(count, count)) * rng.lognormal(0, 2, (count, 1))
        covariance, shares = root @ root.T + 1e-3 * np.eye(count), rng.dirichlet(np.ones(count))
        weights = weights_for(covariance, shares)
        assert (weights > 0).all()
        np.testing.assert_allclose(weights * (covariance @ weights), shares, rtol=1e-6)
    # without correlations each is over its own deviation
    np.testing.assert_allclose(weights_for(np.diag([4.0, 25.0]), np.array([0.64, 0.36])), [0.4, 0.12])


def test_weights_keep_the_sign_of_a_penalty_and_give_the_shares() -> None:
    values = drawn(2)
    found = figures(values, [1.0, -0.5], 8)
    weights = found.weights({"a": 3, "b": 1})
    assert weights["a"] > 0 > weights["b"] and weights["a"] - weights["b"] == pytest.approx(1)
    again = figures(values, list(weights.values()), 8)
    assert again.scales["a"].share.mean == pytest.approx(0.75)


def test_what_no_weight_can_do_is_said() -> None:
    values = drawn(3) | {"still": [1.0] * 480}
    found = figures(values, [1.0, 1.0, 1.0], 8)
    assert found.scales["still"].dead == 1 and found.scales["still"].share.mean == 0
    with pytest.raises(ConfigError, match="'still' is the same for all samples of a prompt"):
        found.weights({"a": 1, "b": 1, "still": 1})
    with pytest.raises(ConfigError, match="shares are of a, b, still; give each one"):
        found.weights({"a": 1, "b": 1})


def test_the_command_measures_the_start_model_and_prints_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, path = str(recipe("tiny_sd3/flow_grpo")), tmp_path / "shares.json"
    sizes = ["--prompts", "6", "--samples", "4"]
    with pytest.raises(SystemExit) as left:
        main(["rewards", "calibrate", config, TWO, *sizes, "--shares", "shapes=1,tiny_clip=3", "--json", str(path)])
    assert not left.value.code
    record, printed = json.loads(path.read_text()), capsys.readouterr().out
    assert "weights for the shares" in printed and '"name": "tiny_clip"' in printed
    settings = load(recipe("tiny_sd3/flow_grpo"), [TWO])
    found = calibrate(
        build_policy(settings),
        build_rewards(settings.rewards),
        list(record["weights"].values()),
        Prompts.of(settings.data).spread(6),
        settings.rollout,
        4,
    )
    assert found.scales["shapes"].share.mean == pytest.approx(0.25, abs=1e-4)
    assert found.scales["tiny_clip"].within == pytest.approx(record["rewards"]["tiny_clip"]["within"])


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "`rewards` has 1; name two"),
        ([TWO, "--shares", "shapes=half"], "no number in 'shapes=half'"),
        ([TWO, "--shares", "shapes=0,tiny_clip=1"], "'shapes=0' is not above 0"),
        ([TWO, "--shares", "shapes=1,clip=1", "--prompts", "2", "--samples", "2"], "shares are of shapes, tiny_clip"),
    ],
)
def test_what_cannot_be_calibrated(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["rewards", "calibrate", str(recipe("tiny_sd3/flow_grpo")), *words])
    assert left.value.code == 2 and message in capsys.readouterr().err
