"""What trajectory algorithms refuse before a model loads."""

from typing import Any

import pytest
import torch

from flowalign.config import load, recipe
from flowalign.errors import ConfigError


def silent(x: Any, v: Any, sigma: Any, sigma_next: Any, eta: Any) -> Any:
    """A user's own deterministic kernel."""
    return x + v * (sigma_next - sigma), torch.zeros_like(sigma)


class Short:
    """A user's own plan, a step too short."""

    def etas(self, steps: int, eta: float, iteration: int, seed: int) -> torch.Tensor:
        return torch.full((steps - 1,), eta)


def refusal(name: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(recipe(name), overrides).check(processes=1)
    return str(caught.value)


@pytest.mark.parametrize("kernel", ["ode", "samplers.kernels:ode", f"'{__name__}:silent'"])
def test_a_kernel_without_noise_has_no_actions_to_learn_from(kernel: str) -> None:
    assert "adds no noise at step 0 of 5" in refusal("tiny_sd3/flow_grpo", f"rollout.kernel={kernel}")


def test_a_step_whose_noise_the_kernel_takes_away_is_refused() -> None:
    message = refusal("tiny_sd3/flow_grpo", "rollout.kernel=cps", "rollout.plan={name: all, last: true}")
    assert "'cps' adds no noise at step 4" in message


def test_reinflow_has_noise_of_its_own() -> None:
    config = load(recipe("tiny_sd3/reinflow"))
    assert config.rollout.kernel == "ode" and config.rollout.share_start_noise
    config.check(processes=1)


def test_off_policy_weights_are_of_the_weights_of_now_over_the_sampling_ones() -> None:
    own = "training.snapshots={old: {decay: 0.5}}", "rollout.weights=old", "algorithm.off_policy={level: token}"
    assert "'old' would sample the steps and score them again" in refusal("tiny_sd3/flow_grpo", *own)


@pytest.mark.parametrize(
    ("name", "override", "says"),
    [
        ("reinflow", "training.seed=0", "reinflow learns its noise; null works"),
        ("dsrl", "training.seed=0", "dsrl's only action is its start noise; null works"),
        ("flow_grpo", "data.dynamic_sampling={}", "weighs one rollout; data.dynamic_sampling and replay go without"),
    ],
)
def test_off_policy_weights_are_of_one_rollout_of_steps(name: str, override: str, says: str) -> None:
    message = refusal(f"tiny_sd3/{name}", "algorithm.off_policy={level: token}", override)
    assert message.startswith("algorithm.off_policy: ") and message.endswith(says)


@pytest.mark.parametrize("name", ["flow_grpo", "nft"])
def test_a_group_of_one_start_noise_and_nothing_else_is_refused(name: str) -> None:
    """By its kernel, or since the method samples along the ODE."""
    config = load(recipe("tiny_sd3/flow_grpo"), ["rollout.share_start_noise=true"])
    config.check_sampling(1, config.build_algorithm())
    own = ["rollout.kernel=ode"] if name == "flow_grpo" else ["rollout.share_start_noise=true"]
    config = load(recipe(f"tiny_sd3/{name}"), own)
    with pytest.raises(ConfigError, match="share_start_noise: without noise on the way"):
        config.check_sampling(1, config.build_algorithm())


@pytest.mark.parametrize(
    ("name", "plan", "works"),
    [
        ("hicogen", "{name: all}", "{name: decay"),
        ("mix_grpo", "{name: all}", "{name: window"),
        ("flow_grpo_fast", "{name: decay}", "{name: window"),
        ("g2rpo", "{name: 'samplers.plans:Window', size: 1}", "{name: single"),
        ("branch_grpo", "{name: all}", "{name: tree"),
    ],
)
def test_a_method_needs_its_plan(name: str, plan: str, works: str) -> None:
    message = refusal(f"tiny_sd3/{name}", f"rollout.plan={plan}")
    assert f"{name} does not work with the plan" in message and works in message


def test_a_plan_by_dotted_path_is_the_same_plan() -> None:
    plan = "rollout.plan={name: 'samplers.plans:Window', size: 2}"
    load(recipe("tiny_sd3/flow_grpo_fast"), [plan]).check(processes=1)


def test_a_plan_must_give_a_level_a_step() -> None:
    assert "for each of 5 steps" in refusal("tiny_sd3/flow_grpo", f"rollout.plan={{name: '{__name__}:Short'}}")


def test_a_plan_may_not_raise_eta_above_what_the_kernel_takes() -> None:
    plan = "rollout.plan={name: calibrated}"
    assert "eta is 1.4; with this kernel it is at most 1" in refusal("tiny_sd3/flow_grpo", "rollout.kernel=cps", plan)


def test_calibrated_noise_counts_gains_over_the_whole_value_before_a_step() -> None:
    settings = ("rollout.plan={name: calibrated}", "algorithm={name: dense_grpo, baseline: fitted}")
    assert "algorithm.baseline: the plan 'calibrated' counts gains" in refusal("tiny_sd3/dense_grpo", *settings)


def test_grpo_guard_needs_gaussian_log_probabilities() -> None:
    assert "corrects Gaussian" in refusal("tiny_sd3/grpo_guard", "rollout.kernel=cps_published")


def test_a_guarded_ratio_does_not_go_with_noise_that_is_learned() -> None:
    assert "reinflow learns its noise" in refusal("tiny_sd3/reinflow", "algorithm.ratio=guard")


def test_hicogen_weights_three_levels() -> None:
    config = load(recipe("sd3/hicogen"))
    names = {reward.name for reward in config.rewards}
    levels = config.algorithm.settings["levels"]
    assert len(levels) == 3 and {level.partition("/")[0] for level in levels} == names


@pytest.mark.parametrize("name", ["dense_grpo", "branch_grpo", "tp_grpo", "g2rpo"])
def test_trajectories_that_are_completed_or_branched_are_of_the_first_order(name: str) -> None:
    assert "order: 1 works" in refusal(f"tiny_sd3/{name}", "rollout.order=2")
