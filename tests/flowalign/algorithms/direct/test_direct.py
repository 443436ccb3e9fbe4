"""The methods of the direct engine on the shipped tiny Stable Diffusion 3."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowalign import registry
from flowalign.actors.draw import Draw
from flowalign.config import load, recipe
from flowalign.data import ASSETS
from flowalign.data.batches import draw_batch
from flowalign.errors import ConfigError
from flowalign.policies.diffusion.storage import load_pipeline
from flowalign.policies.diffusion.window import Window
from flowalign.training import Trainer
from rewards import Scores, Spec
from rewards.frames import PerFrame
from tests.flowalign.small_run import small_run


class Red:
    """Mean red, a reward whose value is easy to say."""

    name = "red"
    spec = Spec(frozenset({"image"}), differentiable=True)

    def __call__(self, samples, prompts, metadata) -> Scores:
        return Scores(torch.tensor([sum(image.getdata(0)) / len(image.getdata(0)) / 255 for image in samples]))

    def score_pixels(self, pixels: Tensor, prompts, metadata) -> Scores:
        return Scores(pixels[:, 0].mean((1, 2)))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Trainer:
    """Of DRaFT; other algorithms borrow its policy and actor."""
    return small_run("tiny_sd3/draft", tmp_path_factory.mktemp("draft"), "training.previews=0", reward=Red())


def experienced(run: Trainer, name: str, **settings: Any) -> tuple[Any, Any]:
    """An algorithm of these settings, and the experience of two groups of two."""
    kind = registry.resolve("algorithms", name)
    algorithm = kind(kind.Settings(**settings))
    batch = draw_batch(run.prompts, 0, 2, 2, 0, False)
    return algorithm, algorithm.collect(run.actor, Draw(run.actor, batch))


def gradient(run: Trainer, loss: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss.sum(), list(run.policy.trainable().values()))])


def test_refl_is_the_reward_of_the_predicted_picture(run) -> None:
    """With the published loss, 1e-3 * relu(margin - reward)."""
    algorithm, experience = experienced(run, "refl", steps=(2, 4), margin=0.9, reward_weight=1e-3)
    assert set(experience.first.tolist()) <= {2, 3, 4}
    loss, metrics = algorithm.losses(run.policy, experience, experience.items)
    trajectory, rows = experience.rollout.trajectory, torch.arange(4)
    sigma = trajectory.sigmas[experience.first].view(4, 1, 1, 1)
    x0 = trajectory.latents[rows, experience.first] - sigma * trajectory.velocity[rows, experience.first]
    value = Red().score_pixels(run.policy.decode_pixels(x0), [], []).value
    torch.testing.assert_close(metrics["reward/mean"], value, atol=1e-5, rtol=0)
    torch.testing.assert_close(loss, 1e-3 * (0.9 - value).relu(), atol=1e-7, rtol=0)
    assert torch.equal(metrics["reward/saturated"], (value >= 0.9).float())
    # above the margin there is nothing to learn
    algorithm.settings.margin = float(value.min()) - 1e-3
    loss, metrics = algorithm.losses(run.policy, experience, experience.items)
    assert not gradient(run, loss).any() and metrics["reward/saturated"].all()


def test_drafts_windows_are_nested(run) -> None:
    """All have the value of the finished picture, and each step more adds to the gradient."""
    gradients = []
    for last_steps in (1, 2, None):
        algorithm, experience = experienced(run, "draft", last_steps=last_steps)
        loss, _ = algorithm.losses(run.policy, experience, experience.items)
        value = Red()(run.policy.decode(experience.rollout), [], []).value
        torch.testing.assert_close(-loss, value, atol=1 / 255, rtol=0)
        gradients.append(gradient(run, loss))
    assert all(g.norm() > 1e-4 for g in gradients)
    assert gradients[0].norm() < gradients[1].norm() < gradients[2].norm()


def test_draft_lv_has_less_variance(run) -> None:
    """Over draws of the noise: the mean gradient of finished samples noised again, whichever they are, is one."""
    algorithm, experience = experienced(run, "draft", draws=3)
    loss, metrics = algorithm.losses(run.policy, experience, experience.items)
    assert loss.shape == metrics["reward/mean"].shape == (4,)
    again, _ = algorithm.losses(run.policy, experience, experience.items)
    assert torch.equal(loss, again)
    window = Window(run.policy, experience.rollout, torch.arange(4))
    latents = algorithm.finished(window, experience)
    assert len(latents) == 4 * 4
    # the step takes what was noised again near to where it came from
    distance = (latents.view(4, 4, -1) - latents[:4].view(4, -1)).square().mean((1, 2)).sqrt()
    assert distance[0] == 0 and (distance[1:] > 0).all() and (distance[1:] < latents.std() / 2).all()


def test_rewards_without_a_gradient_are_refused_by_name() -> None:
    refused = {
        "rewards=[{name: shapes}]": "'shapes' has no gradient to learn by; .*tiny_clip.*image_reward.* work",
        "rewards=[{name: product, rewards: [{name: tiny_clip}, {name: ocr}]}]": "'ocr' has no gradient",
        "rewards=[{name: cached, reward: {name: tiny_clip}}]": "'cached' has no gradient",
    }
    for override, message in refused.items():
        with pytest.raises(ConfigError, match=message):
            load(recipe("tiny_sd3/draft"), [override]).check(1)
    load(recipe("tiny_sd3/draft"), ["rewards=[{name: per_frame, reward: {name: tiny_clip}}]"]).check(1)
    load(recipe("tiny_sd3/draft"), ["rewards=[{name: rescaled, reward: {name: tiny_clip}, low: 0, high: 1}]"]).check(1)


def test_rewards_of_ones_own_are_refused_before_the_model_loads(tmp_path: Path) -> None:
    def red(samples, prompts):
        return [0.0] * len(samples)

    with pytest.raises(ConfigError, match="'red' has no gradient"):
        small_run("tiny_sd3/draft", tmp_path, "model.path=nowhere", reward=red)
    group = "rewards=[{name: agreement, reward: {name: tiny_clip}}]"
    with pytest.raises(ConfigError, match="micro_batch_size of whole groups"):
        small_run("tiny_sd3/draft", tmp_path, "model.path=nowhere", "training.micro_batch_size=3", group)


def test_windows_that_do_not_fit_the_schedule_are_refused() -> None:
    for override, message in {
        "algorithm.last_steps=6": "has 5 steps, not 6",
        "algorithm={name: draft, draws: 2, last_steps: 2}": "last_steps: 1 works",
        "algorithm={name: refl}": r"\[3, 4\] works",
    }.items():
        with pytest.raises(ConfigError, match=message):
            load(recipe("tiny_sd3/draft"), [override]).check(1)


def test_ctrl_u_weighs_the_loss_by_agreement(run) -> None:
    """Two generations of a condition, each with exp(-disagreement) of its loss."""
    from rewards.compose import Agreement

    algorithm, experience = experienced(run, "draft")
    plain, _ = algorithm.losses(run.policy, experience, experience.items)
    experience.reward = Agreement(Red(), temperature=0.1)
    weighed, _ = algorithm.losses(run.policy, experience, experience.items)
    gaps = (plain[0::2] - plain[1::2]).abs().repeat_interleave(2)
    torch.testing.assert_close(weighed, plain * (-gaps / 0.1).exp())


def test_videos_are_worth_their_frames() -> None:
    """As tensors with gradients what they are as pictures, and with attenuation more in the middle."""
    pixels = torch.rand(2, 3, 9, 4, 4, requires_grad=True)
    reward = PerFrame(Red(), frames=3)
    value = reward.score_pixels(pixels, ["", ""], [{}, {}]).value
    torch.testing.assert_close(value, pixels[:, 0, [0, 4, 8]].mean((1, 2, 3)))
    value.sum().backward()
    assert pixels.grad is not None and pixels.grad[:, 0, 4].all() and not pixels.grad[:, :, 3].any()
    weights = PerFrame(Red(), frames=3, attenuation=1.0).weights
    torch.testing.assert_close(weights[1] / weights[0], torch.tensor(1.0).exp())


def test_a_run_learns_and_its_adapter_loads_in_plain_diffusers(tmp_path: Path) -> None:
    """Ten iterations make pictures redder."""
    own = ["training.iterations=10", "training.previews=0", "training.optimizer.schedule=constant"]
    run = small_run("tiny_sd3/draft", tmp_path, *own, reward=Red())
    run.train()
    metrics = run.metrics.read()
    assert metrics[-1]["reward/mean"] > metrics[0]["reward/mean"] + 0.01
    pipe = load_pipeline(ASSETS / "tiny_sd3", torch.float32)
    pipe.load_lora_weights(tmp_path / "run/lora")
    assert pipe.transformer.peft_config
