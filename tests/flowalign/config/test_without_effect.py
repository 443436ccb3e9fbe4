"""Settings without an effect, and those under which nothing would be learned, are refused or said."""

import logging
from pathlib import Path

import pytest

from flowalign.config import load, recipe
from flowalign.errors import ConfigError
from tests.flowalign.small_run import small_run


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("tiny_sd3/flow_grpo", "training.optimizer.warmup_updates=3", "schedule 'constant' has no warm-up"),
        ("tiny_sd3/flow_grpo", "evaluation.rlg_from=3", "without rlg it does nothing"),
        ("tiny_sd3/flow_grpo", "evaluation={rlg: 1.5, rlg_from: 99}", "no step of .* is left for rlg"),
        ("tiny_sd3/flow_grpo", "training.subsample={share: 1e-4}", "of an update is less than one; .* works"),
        ("tiny_sd3/flow_grpo", "rewards=[{name: shapes, weight: 1e-30}]", "nothing would be learned from 'shapes'"),
        ("tiny_sd3/flow_grpo", "rewards=[{name: shapes, weight: 0}]", "nothing would be learned from 'shapes'"),
        ("tiny_sd3/flow_grpo", "rewards=[{name: tiny_clip}, {name: shapes, weight: 1e-9}]", "rewards.1.weight"),
        ("tiny_sd3/dmd2", "algorithm.fake.alone=100000", "fake.alone: .* leave the policy as it is"),
        ("tiny_sd3/tdm", "algorithm.fake.alone=100000", "fake.alone: .* leave the policy as it is"),
        ("tiny_sd3/tdm_r1", "algorithm.fake.alone=100000", "fake.alone: .* leave the policy as it is"),
    ],
)
def test_refused(name: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(recipe(name), ["training.optimizer.schedule=constant", override]).check(1)


def test_a_reward_that_is_only_measured_has_weight_0() -> None:
    load(recipe("tiny_sd3/flow_grpo"), ["rewards=[{name: shapes}, {name: tiny_clip, weight: 0}]"]).check(1)


def test_a_kernel_that_nothing_samples_with_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = ["rollout.kernel=dance_sde", "rollout.eta=1.2"]
    with caplog.at_level(logging.WARNING):
        small_run("tiny_sd3/nft", tmp_path, *own, "name=with")
    assert "rollout.kernel, rollout.eta has no effect: nft samples along the ODE" in caplog.text
    caplog.clear()
    for number, more in enumerate(([], [*own, "algorithm.stochastic=true"])):
        small_run("tiny_sd3/nft", tmp_path, *more, f"name=without{number}")
    assert "has no effect" not in caplog.text


def test_samples_of_a_group_share_their_start_where_the_sde_tells_them_apart(tmp_path: Path) -> None:
    shared = ["rollout.share_start_noise=true", "rollout.plan={name: window, start: 1, size: 1}"]
    run = small_run("tiny_sd3/nft", tmp_path, *shared, "algorithm.stochastic=true")
    metrics = run.collect(run.groups.draw(0)).metrics
    assert metrics["noise/starts"] == 4 and metrics["reward/zero_spread"] < 1
    with pytest.raises(ConfigError, match="would all be the same"):
        load(recipe("tiny_sd3/nft"), shared).check(1)
