"""RewardDance and OneReward: a judge compares a late step's picture with another model's own, through the pixels."""

from pathlib import Path

import pytest
import torch

from flowalign.algorithms.direct.one_reward import OneReward
from flowalign.algorithms.direct.reward_dance_refl import RewardDanceReFL
from flowalign.config import load, recipe
from flowalign.config.rewards import build_reward
from flowalign.data.batches import draw_batch
from flowalign.errors import ConfigError
from flowalign.training import Trainer
from tests.flowalign.small_run import small_run


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Trainer:
    return small_run("tiny_sd3/reward_dance_refl", tmp_path_factory.mktemp("dance"), "training.previews=0")


def test_the_judge_compares_with_the_starts_picture_of_the_same_prompt(run) -> None:
    """From other noise; the loss is minus its probability that the predicted picture is better, and has a gradient."""
    settings = RewardDanceReFL.Settings(steps=(3, 4))
    batch = draw_batch(run.prompts, 0, 2, 2, 0, False)
    parameters = list(run.policy.trainable().values())
    kept = [parameter.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.data += 0.3 * torch.randn_like(parameter)
    experience = RewardDanceReFL(settings).at_once(run.sampler, run.scorer, batch)
    loss, metrics = RewardDanceReFL(settings).losses(run.policy, experience, experience.items)
    gradients = torch.autograd.grad(loss.sum(), parameters)
    for parameter, value in zip(parameters, kept, strict=True):
        parameter.data.copy_(value)
    assert any(gradient.any() for gradient in gradients)
    assert ((metrics["reward/mean"] > 0) & (metrics["reward/mean"] < 1)).all()
    # the start's own picture, whatever the policy became, and of no member's noise
    references = [record["reference"] for record in experience.metadata]
    plain = run.sampler.rollout(batch)
    assert all(one not in run.sampler.decode(plain) for one in references)
    x0 = experience.rollout.trajectory.latents
    window = experience.first
    rows = torch.arange(4)
    at = experience.rollout.trajectory.sigmas[window].view(4, 1, 1, 1)
    predicted = x0[rows, window] - at * experience.rollout.trajectory.velocity[rows, window]
    shown = run.policy.decode_latents(predicted)
    asked = run.scorer.reward(shown, batch.prompts, [{"reference": picture} for picture in references]).value
    torch.testing.assert_close(-loss, asked, atol=0.02, rtol=0)
    again = RewardDanceReFL(settings).compared(run.sampler, batch)
    assert [record["reference"] for record in again.metadata] == references


def test_one_reward_tells_the_judge_a_criterion_of_each_sample(run) -> None:
    algorithm = OneReward(OneReward.Settings(criteria=["colour", "shape"]))
    assert algorithm.snapshots["compared"].decay == 1
    assert {algorithm.told(seed)["criterion"] for seed in range(20)} == {"colour", "shape"}
    assert algorithm.told(3) == algorithm.told(3)


def test_a_reward_that_does_not_compare_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reward_dance_refl learns by comparing two; .*reward_dance_reference"):
        small_run("tiny_sd3/reward_dance_refl", tmp_path, "model.path=nowhere", "rewards=[{name: tiny_clip}]")
    served = "rewards=[{name: vlm_judge, template: one_reward, judge: {url: 'http://nowhere/v1', model: none}}]"
    config = load(recipe("tiny_sd3/one_reward"), [served])
    with pytest.raises(ConfigError, match="'one_reward' has no gradient"):
        OneReward(OneReward.Settings()).check_reward(build_reward(config.rewards), config)
