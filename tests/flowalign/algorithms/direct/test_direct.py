"""The methods of the direct engine on the shipped tiny Stable Diffusion 3."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowalign import registry
from flowalign.config import load, recipe
from flowalign.data import ASSETS
from flowalign.data.batches import draw_batch
from flowalign.errors import ConfigError
from flowalign.policies.diffusion.storage import load_pipeline
from flowalign.policies.diffusion.window import GradientWindow
from flowalign.training import Trainer
from rewards import Scores, Spec
from rewards.frames import PerFrame
from samplers import KERNELS
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
    """Of DRaFT; other algorithms borrow its policy and sampler."""
    return small_run("tiny_sd3/draft", tmp_path_factory.mktemp("draft"), "training.previews=0", reward=Red())


def experienced(run: Trainer, name: str, **settings: Any) -> tuple[Any, Any]:
    """An algorithm of these settings, and the experience of two groups of two."""
    kind = registry.resolve("algorithms", name)
    algorithm = kind(kind.Settings(**settings))
    batch = draw_batch(run.prompts, 0, 2, 2, 0, False)
    return algorithm, algorithm.at_once(run.sampler, run.scorer, batch)


def gradient(run: Trainer, loss: Tensor) -> Tensor:
    return torch.cat(
        [g.flatten() for g in torch.autograd.grad(loss.sum(), list(run.policy.trainable().values()), retain_graph=True)]
    )


@contextlib.contextmanager
def moved(run: Trainer) -> Iterator[None]:
    """Within it the weights are not the start's."""
    kept = [parameter.clone() for parameter in run.policy.trainable().values()]
    for parameter in run.policy.trainable().values():
        parameter.data += 0.05 * torch.randn_like(parameter)
    yield
    for parameter, value in zip(run.policy.trainable().values(), kept, strict=True):
        parameter.data.copy_(value)


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
    window = GradientWindow(run.policy, experience.rollout, torch.arange(4))
    latents = algorithm.finished(window, experience)
    assert len(latents) == 4 * 4
    # the step takes what was noised again near to where it came from
    distance = (latents.view(4, 4, -1) - latents[:4].view(4, -1)).square().mean((1, 2)).sqrt()
    assert distance[0] == 0 and (distance[1:] > 0).all() and (distance[1:] < latents.std() / 2).all()


def test_draft_plus_is_held_near_the_start(run) -> None:
    """Its penalty is the mean squared difference of velocities in the window, 0 at the start."""
    algorithm, experience = experienced(run, "draft_plus", last_steps=2, kl_weight=10.0)
    plain, _ = experienced(run, "draft", last_steps=2)
    with moved(run):
        loss, metrics = algorithm.losses(run.policy, experience, experience.items)
        without, _ = plain.losses(run.policy, experience, experience.items)
        assert (metrics["policy/kl"] > 0).all() and gradient(run, metrics["policy/kl"]).any()
        torch.testing.assert_close(loss, without + 10 * metrics["policy/kl"])
    loss, metrics = algorithm.losses(run.policy, experience, experience.items)
    assert not metrics["policy/kl"].any()


def test_alignprop_cuts_all_samples_at_one_random_step(run) -> None:
    algorithm, experience = experienced(run, "alignprop", mean=0.5, std=0.3)
    firsts = set()
    for iteration in range(40):
        batch = draw_batch(run.prompts, iteration, 2, 2, 0, False)
        [first] = set(algorithm.first_steps(batch, run.config).tolist())
        firsts.add(first)
    assert firsts == {1, 2, 3, 4}
    experience.first = torch.full((4,), 3)
    loss, _ = algorithm.losses(run.policy, experience, experience.items)
    same, _ = experienced(run, "draft", last_steps=2)
    other, _ = same.losses(run.policy, experience, experience.items)
    assert torch.equal(gradient(run, loss), gradient(run, other))


def test_samples_walk_from_steps_of_their_own(run) -> None:
    """Each as if alone, with the divergence of its own steps; at the start weights all end where the rollout did."""
    _, experience = experienced(run, "draft", last_steps=2)
    first = torch.tensor([3, 4, 4, 3])
    window = GradientWindow(run.policy, experience.rollout, torch.arange(4), compare=True)
    torch.testing.assert_close(window.walk(window.state(first), first), window.state(window.last), atol=1e-5, rtol=0)
    with moved(run):
        window = GradientWindow(run.policy, experience.rollout, torch.arange(4), compare=True)
        together = window.walk(window.state(first), first)
        for row, step in enumerate(first.tolist()):
            alone = GradientWindow(run.policy, experience.rollout, torch.tensor([row]), compare=True)
            walked = alone.walk(alone.state(step), step)
            torch.testing.assert_close(together[[row]], walked, atol=1e-5, rtol=0)
            torch.testing.assert_close(window.divergence[[row]], alone.divergence)
        assert (window.divergence > 0).all()


def test_leaps_are_straight_through(run) -> None:
    """The values are the rollout's bit for bit; the gradient is the literal one of two leaps with a discount."""
    algorithm, experience = experienced(run, "leap_align", discount=0.3, similarity=0.0)
    window = GradientWindow(run.policy, experience.rollout, torch.arange(4))
    made = algorithm.finished(window, experience)
    assert torch.equal(made, experience.rollout.trajectory.final)
    direction = torch.randn_like(made)
    mine = gradient(run, (made * direction).sum()[None])
    first = experience.first
    between = first + 1 + (experience.uniform(torch.arange(4)) * (4 - first)).long()
    assert (first < between).all() and (between < 5).all()
    sigma = (experience.rollout.trajectory.sigmas.view(-1, 1, 1, 1))[between]
    # the second leap with its starting point held, plus all that comes by way of it
    held = window.state(between) - sigma * window.velocity(window.state(between), between)
    by_velocity = gradient(run, (held * direction).sum()[None])
    x = window.state(between).requires_grad_()
    [through] = torch.autograd.grad((window.velocity(x, between) * -sigma * direction).sum(), x)
    leapt = window.leap(window.state(first), first, between)
    by_start = gradient(run, (leapt * (direction + 0.3 * through)).sum()[None])
    torch.testing.assert_close(mine, by_velocity + by_start, atol=1e-5, rtol=1e-4)
    # leaps that end elsewhere count less
    algorithm.settings.similarity = 2.0
    less = gradient(run, (algorithm.finished(window, experience) * direction).sum()[None])
    assert 0 < less.norm() < mine.norm()


class Exact:
    """The velocity of one sample and one noise, and an error that is 0."""

    def __init__(self, x0: Tensor, noise: Tensor) -> None:
        self.x0, self.noise, self.error = x0, noise, torch.zeros_like(x0, requires_grad=True)
        self.model = self._bare = None

    def velocity(self, rollout, samples, steps, x):
        return self.noise - self.x0 + self.error


def test_srpo_recovers_x0_under_the_exact_velocity(run) -> None:
    algorithm, experience = experienced(run, "srpo", steps=(1, 4))
    trajectory, rows = experience.rollout.trajectory, torch.arange(4)
    x0, sigmas = trajectory.final, trajectory.sigmas
    assert set(experience.first.tolist()) <= {2, 3}
    exact = GradientWindow(Exact(x0, trajectory.latents[:, 0]), experience.rollout, rows)
    recovered = algorithm.finished(exact, experience)
    torch.testing.assert_close(recovered, torch.cat([x0, x0]), atol=1e-5, rtol=0)
    # and the branches pull the velocity in opposite directions, by as much as their levels say
    direction = torch.randn_like(x0)
    down, up = (
        torch.autograd.grad((half * direction).sum(), exact.policy.error, retain_graph=True)[0]
        for half in recovered.chunk(2)
    )
    above, at, below = (sigmas[experience.first + more].view(4, 1, 1, 1) for more in (-1, 0, 1))
    torch.testing.assert_close(down, (at - above) / (1 - at) * direction)
    torch.testing.assert_close(up, (at - below) / (1 - at) * direction)
    made = algorithm.finished(GradientWindow(run.policy, experience.rollout, rows), experience)
    assert (made - torch.cat([x0, x0])).abs().max() > 0.01


def test_srpos_reward_is_relative(run) -> None:
    class Long(Red):
        """Worth its red times the length of its prompt."""

        def score_pixels(self, pixels, prompts, metadata):
            return Scores(pixels[:, 0].mean((1, 2)) * torch.tensor([float(len(text)) for text in prompts]))

    algorithm, experience = experienced(run, "srpo", steps=(1, 4), wanted=["longer"], unwanted=[""])
    experience.reward, experience.first = Long(), torch.tensor([2, 3, 2, 3])
    pixels = torch.rand(8, 3, 32, 32)
    value = algorithm.scored(experience, torch.arange(4).repeat(2), pixels).value
    short = torch.tensor([float(len(text)) for text in experience.rollout.prompts])
    red, long = pixels[:, 0].mean((1, 2)), short + len("longer. ")
    # the noisier the level, the larger k in denoising and the smaller in inversion, which starts a step below
    k_down = 0.1 + 0.15 * torch.tensor([2, 1, 2, 1]) / 3
    k_up = 0.3 - 0.29 * torch.tensor([1, 0, 1, 0]) / 3
    torch.testing.assert_close(value[:4], red[:4] * ((1 + k_down) * long - short))
    torch.testing.assert_close(value[4:], red[4:] * ((1 + k_up) * short - long))


def test_r0_and_instruct_video_take_their_windows(run) -> None:
    algorithm, experience = experienced(run, "r0")
    assert set(experience.first.tolist()) <= set(range(5)) and algorithm.uses_reference
    window = GradientWindow(run.policy, experience.rollout, torch.arange(4))
    made = algorithm.finished(window, experience)
    velocity = experience.rollout.trajectory.velocity[torch.arange(4), experience.first]
    sigma = experience.rollout.trajectory.sigmas[experience.first].view(-1, 1, 1, 1)
    torch.testing.assert_close(made, window.state(experience.first) - sigma * velocity, atol=1e-5, rtol=0)

    algorithm, experience = experienced(run, "instruct_video", strength=0.6)
    made = algorithm.finished(window, experience)
    sigmas = experience.rollout.trajectory.sigmas
    x = (1 - sigmas[2]) * window.state(5) + sigmas[2] * experience.noise(torch.arange(4))
    with torch.no_grad():
        for step in (2, 3):
            x = x + (sigmas[step + 1] - sigmas[step]) * window.velocity(x, step)
    x = x - sigmas[4] * window.velocity(x, 4)
    torch.testing.assert_close(made, x)
    torch.testing.assert_close(gradient(run, made.sum()[None]), gradient(run, x.sum()[None]))


@pytest.fixture
def memoryless(run, monkeypatch) -> None:
    monkeypatch.setattr(run.sampler, "kernel", KERNELS["ddim"])
    monkeypatch.setattr(run.config.rollout, "eta", 1.0)


def test_adjoint_matching_has_no_loss_where_there_is_no_reward(run, memoryless) -> None:
    algorithm, experience = experienced(run, "adjoint_matching", scale=0.0, steps_per_sample=2)
    loss, metrics = algorithm.losses(run.policy, experience, experience.items)
    assert len(loss) == 4 * 2 and not loss.any() and not gradient(run, loss).any()
    with moved(run):
        loss, metrics = algorithm.losses(run.policy, experience, experience.items)
        assert (loss > 0).all() and (metrics["policy/kl"] > 0).all()


def test_lean_adjoints_are_the_gradient_of_the_rest_of_the_rollout(run, memoryless) -> None:
    """At the start weights with the noise held; the loss is the literal one."""
    algorithm, experience = experienced(run, "adjoint_matching", scale=50.0, steps_per_sample=2)
    window = GradientWindow(run.policy, experience.rollout, torch.arange(4))
    for step in (2, 4):
        x = window.state(step).requires_grad_()
        value = Red().score_pixels(run.policy.decode_pixels(window.walk(x, step)), [], []).value
        [expected] = torch.autograd.grad(-50 * value.sum(), x)
        adjoint = experience.adjoint[:, step - 1]
        torch.testing.assert_close(adjoint, expected, atol=1e-3 * float(expected.abs().max()), rtol=0)
    steps = experience.items[:, 1]
    assert (steps.view(4, 2)[:, 0] < 2).all() and (steps.view(4, 2)[:, 1] >= 2).all() and (steps < 4).all()
    with moved(run):
        loss, _ = algorithm.losses(run.policy, experience, experience.items)
        trajectory, literal = experience.rollout.trajectory, []
        for sample, step in experience.items.tolist():
            one, x = torch.tensor([sample]), trajectory.latents[sample, step][None]
            at, to = (trajectory.sigmas[k].view(1, 1, 1, 1) for k in (step, step + 1))
            with torch.no_grad():
                velocity = run.policy.velocity(experience.rollout, one, torch.tensor([step]), x)
                with run.policy.reference():
                    start = run.policy.velocity(experience.rollout, one, torch.tensor([step]), x)
            mean, std = KERNELS["ddim"](x, velocity, at, to, torch.ones(1, 1, 1, 1))
            base, _ = KERNELS["ddim"](x, start, at, to, torch.ones(1, 1, 1, 1))
            literal.append(((mean - base) / std + std * experience.adjoint[sample, step]).square().sum())
    torch.testing.assert_close(loss, torch.stack(literal), rtol=1e-3, atol=1e-3)


def test_adjoint_matching_guides_rollouts_only(run, memoryless, monkeypatch) -> None:
    monkeypatch.setattr(run.config.rollout, "guidance", 7.5)
    algorithm, experience = experienced(run, "adjoint_matching", scale=0.0, steps_per_sample=2)
    algorithm.verify(run.policy, experience)
    before = run.policy.forwards
    algorithm.losses(run.policy, experience, experience.items)
    # two forwards of each step, the policy's and the start's: none for an empty prompt
    assert run.policy.forwards - before == 2 * len(experience.items)
    rows, steps = experience.items.unbind(1)
    found = run.policy.velocity(experience.rollout, rows, steps)
    torch.testing.assert_close(found, run.policy.velocity(replace(experience.guided, guidance=(1.0,)), rows, steps))
    assert (found - run.policy.velocity(experience.guided, rows, steps)).abs().max() > 0.01


def test_adjoint_matching_refuses_rollouts_that_remember() -> None:
    for override in ("rollout.kernel=ode", "rollout.eta=0.7", "rollout.kernel=flow_sde"):
        with pytest.raises(ConfigError, match="kernel: ddim with eta: 1 works"):
            load(recipe("tiny_sd3/adjoint_matching"), [override]).check(1)
    load(recipe("tiny_sd3/adjoint_matching"), ["rollout.kernel=flow_sde", "rollout.eta=1.41421"]).check(1)


def test_rewards_without_a_gradient_are_refused_by_name() -> None:
    refused = {
        "rewards=[{name: shapes}]": "'shapes' has no gradient to learn by; (?=.*tiny_clip)(?=.*image_reward).* work",
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
    # of 16 frames 0, 5, 10, 15, as in VGen: exp(-abs(global_index - frame_num // 2) * lambda_TAR), up to their sum
    weights = PerFrame(Red(), frames=4, attenuation=0.3).weights(16)
    theirs = (-0.3 * torch.tensor([8.0, 3.0, 2.0, 7.0])).exp()
    torch.testing.assert_close(weights, theirs / theirs.sum())


def test_a_run_learns_and_its_adapter_loads_in_plain_diffusers(tmp_path: Path) -> None:
    """Ten iterations make pictures redder."""
    own = ["training.iterations=10", "training.previews=0", "training.optimizer.schedule=constant"]
    run = small_run("tiny_sd3/draft", tmp_path, *own, reward=Red(), whole=True)
    run.train()
    metrics = run.metrics.read()
    assert metrics[-1]["reward/mean"] > metrics[0]["reward/mean"] + 0.01
    pipe = load_pipeline(ASSETS / "tiny_sd3", torch.float32)
    pipe.load_lora_weights(tmp_path / "run/lora")
    assert pipe.transformer.peft_config
