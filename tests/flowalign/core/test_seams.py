"""What a part of somebody's own gives: each usual mistake is one line that names it."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from flowalign.algorithms.base import Algorithm
from flowalign.algorithms.direct.base import DirectAlgorithm
from flowalign.algorithms.matching.base import Matching
from flowalign.algorithms.matching.online import OnlineMatching
from flowalign.algorithms.trajectory.base import TrajectoryAlgorithm
from flowalign.core.seams import check_method, check_shape, checked_loss
from flowalign.errors import ConfigError, FlowalignError
from tests.flowalign.small_run import small_run


class ScalarLoss(TrajectoryAlgorithm):
    def loss(self, actions):  # type: ignore[no-untyped-def]
        loss, values = super().loss(actions)
        return loss.mean(), values


class ColumnCredit(TrajectoryAlgorithm):
    def credit(self, record):  # type: ignore[no-untyped-def]
        return super().credit(record)[:, None]


class ColumnReward(TrajectoryAlgorithm):
    def step_reward(self, sampled, processes):  # type: ignore[no-untyped-def]
        return sampled.scores.value[:, None]


class Misnamed(TrajectoryAlgorithm):
    def advantage(self, record):  # type: ignore[no-untyped-def]
        return record.reward


class Helped(TrajectoryAlgorithm):
    """A helper of its own may be called as it likes."""

    def weight(self) -> float:
        return 1.0

    def credit(self, record):  # type: ignore[no-untyped-def]
        return self.weight() * super().credit(record)


class NoItems(Algorithm):
    headline = "reward/mean"
    unit = "samples"


class NoWindows(DirectAlgorithm):
    pass


class NoCredit(OnlineMatching):
    pass


class NoLoss(OnlineMatching):
    def credit(self, record):  # type: ignore[no-untyped-def]
        return record.reward


def mean_loss(actions) -> tuple[Tensor, dict[str, Tensor]]:  # type: ignore[no-untyped-def]
    return (-actions.ratio * actions.advantage).mean(), {}


def column_advantage(record) -> Tensor:  # type: ignore[no-untyped-def]
    return record.reward[:, None]


@pytest.mark.parametrize(
    "setting, message",
    [
        (
            f"algorithm={{name: {__name__}.ScalarLoss}}",
            r"ScalarLoss\.loss gave a tensor \[\], and one of shape \[\d+\]",
        ),
        (f"algorithm={{name: {__name__}.ColumnCredit}}", r"ColumnCredit\.credit .* gave a tensor \[16, 1\]"),
        (f"algorithm={{name: {__name__}.ColumnReward}}", r"ColumnReward\.step_reward gave a tensor \[16, 1\]"),
        (
            f"algorithm.loss={{name: {__name__}.mean_loss}}",
            rf"algorithm\.loss: '{__name__}\.mean_loss' gave a tensor \[\]",
        ),
        (f"algorithm.advantage={{name: {__name__}.column_advantage}}", r"column_advantage'\) gave a tensor \[16, 1\]"),
    ],
)
def test_a_wrong_shape_ends_the_first_iteration(setting: str, message: str, tmp_path: Path):
    with pytest.raises(FlowalignError, match=message) as caught:
        small_run("tiny_sd3/flow_grpo", tmp_path, "training.group_size=4", setting).train()
    assert "\n" not in str(caught.value)


def one_number(x, v, sigma, sigma_next, eta):  # type: ignore[no-untyped-def]
    return x.mean(), eta


def without_eta(x, v, sigma, sigma_next):  # type: ignore[no-untyped-def]
    return x, sigma


class ListPlan:
    def etas(self, steps, eta, iteration, seed):  # type: ignore[no-untyped-def]
        return [eta] * steps


class NoPlan:
    pass


class OneShort:
    def picks(self, prompts, iteration, groups, seed, round=0):  # type: ignore[no-untyped-def]
        return list(range(groups - 1))

    def learn(self, picks, prompts, success, gain):  # type: ignore[no-untyped-def]
        pass

    def state_dict(self):  # type: ignore[no-untyped-def]
        return {}

    def load_state_dict(self, state):  # type: ignore[no-untyped-def]
        pass


class Forgetful:
    def picks(self, prompts, iteration, groups, seed, round=0):  # type: ignore[no-untyped-def]
        return list(range(groups))


@pytest.mark.parametrize(
    "setting, message",
    [
        (f"rollout.kernel={__name__}.one_number", r"one_number' does not make a step: .*\(mean\) gave a tensor \[\]"),
        (f"rollout.kernel={__name__}.without_eta", "without_eta' does not make a step: .* positional arguments"),
        (f"rollout.plan={{name: {__name__}.ListPlan}}", "ListPlan' gives a list; it must give a noise level"),
        (f"rollout.plan={{name: {__name__}.NoPlan}}", "NoPlan' has no 'etas'"),
        (f"data.selection={{name: {__name__}.OneShort}}", r"OneShort\.picks gave \[0, 1, 2\], and a list of 4 numbers"),
        (f"data.selection={{name: {__name__}.Forgetful}}", "Forgetful' is no selection, it has no 'learn'"),
    ],
)
def test_kernels_plans_and_selections_are_checked_once(setting: str, message: str, tmp_path: Path):
    with pytest.raises(FlowalignError, match=message) as caught:
        small_run("tiny_sd3/flow_grpo", tmp_path, "training.group_size=4", setting).train()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "kind, message",
    [
        (Misnamed, "nothing calls Misnamed.advantage; did you mean 'credit'"),
        (NoItems, "NoItems has no 'experience'"),
        (NoWindows, "NoWindows has no 'windows'"),
        (NoCredit, "NoCredit has no 'credit'"),
    ],
)
def test_a_name_that_no_run_calls_and_one_that_is_missing_are_refused(kind: type, message: str):
    with pytest.raises(ConfigError, match=message):
        check_method(kind)


def test_a_matching_method_without_a_loss_ends_its_first_iteration(tmp_path: Path):
    with pytest.raises(FlowalignError, match=r"NoLoss has no 'loss', which every run calls \(docs/extending\.md\)"):
        small_run("tiny_sd3/nft", tmp_path, f"algorithm={{name: {__name__}.NoLoss}}").train()


def test_a_helper_that_its_class_calls_and_methods_of_ours_are_left_alone():
    check_method(Helped)
    check_method(Matching)


def test_a_loss_gives_a_pair_whose_values_are_tensors():
    with pytest.raises(FlowalignError, match="mine gave a Tensor"):
        checked_loss("mine", torch.zeros(3), [3])
    with pytest.raises(FlowalignError, match="its value 'kl' is one number"):
        checked_loss("mine", (torch.zeros(3), {"kl": torch.tensor(1.0)}), [3])
    with pytest.raises(FlowalignError, match=r"mine gave a float, and one of shape \[3\] or \[3, 2\]"):
        check_shape("mine", 1.0, [3], [3, 2])
