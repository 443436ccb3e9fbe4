"""What moves the start noise of a generator that stays as it is: HyperNoise by gradients, DSRL by policy gradient."""

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from flowalign.app.loading import load_for_sampling
from flowalign.config import load, recipe
from flowalign.core.divergences import standard_normal_kl
from flowalign.data.batches import draw_batch
from flowalign.errors import ConfigError
from flowalign.rollouts.draw import Draw
from flowalign.training import Trainer
from samplers.start import StartNoise
from tests.flowalign.algorithms.direct.test_direct import Red
from tests.flowalign.small_run import small_run


@pytest.fixture(scope="module")
def hyper(tmp_path_factory) -> Trainer:
    """With an adapter that does something."""
    own = ["training.previews=0", "algorithm.move_weight=0.5"]
    run = small_run("tiny_sd3/hypernoise", tmp_path_factory.mktemp("hyper"), *own, reward=Red())
    torch.manual_seed(0)
    for parameter in run.policy.trainable().values():
        parameter.data += 0.03 * torch.randn_like(parameter)
    return run


def collected(run: Trainer):
    batch = draw_batch(run.prompts, 0, 2, 2, 0, False)
    return run.collect(Draw(run.sampler, run.scorer, batch))


def plain(run: Trainer, seeds) -> Tensor:
    """The start noise that pipelines draw."""
    prompts = ["a red circle"] * len(seeds)
    return run.policy.sample(prompts, seeds, dry=True, **run.config.rollout.arguments()).trajectory.latents[:, 0]


def test_hypernoise_moves_the_noise_and_the_start_weights_sample(hyper) -> None:
    experience = collected(hyper)
    rollout, policy = experience.rollout, hyper.policy
    assert torch.equal(rollout.unmoved, plain(hyper, experience.batch.seeds))
    rows = torch.arange(4)
    with torch.no_grad():
        tuned = policy.velocity(rollout, rows, torch.zeros(4, dtype=torch.long), rollout.unmoved)
        with policy.reference():
            x, zero = rollout.unmoved, torch.zeros(4, dtype=torch.long)
            x = x + tuned - policy.velocity(rollout, rows, zero, x)
            torch.testing.assert_close(rollout.trajectory.latents[:, 0], x, atol=1e-5, rtol=0)
            sigmas = rollout.trajectory.sigmas
            for step in range(5):
                x = x + policy.velocity(rollout, rows, zero + step, x) * (sigmas[step + 1] - sigmas[step])
    assert (rollout.trajectory.latents[:, 0] - rollout.unmoved).abs().max() > 0.01
    torch.testing.assert_close(rollout.trajectory.final, x, atol=1e-4, rtol=0)
    hyper.algorithm.verify(policy, experience)


def test_hypernoises_gradient_is_autograd_through_the_frozen_generator(hyper) -> None:
    """Without checkpoints, and with the generator's adapter off by hand."""
    experience, policy = collected(hyper), hyper.policy
    rollout, rows, zero = experience.rollout, torch.arange(4), torch.zeros(4, dtype=torch.long)
    parameters = list(policy.trainable().values())
    loss, metrics = hyper.algorithm.losses(policy, experience, experience.items)
    mine = torch.autograd.grad(loss.sum(), parameters)
    x, sigmas = rollout.unmoved, rollout.trajectory.sigmas
    tuned = policy.velocity(rollout, rows, zero, x)
    with policy.reference():
        delta = tuned - policy.velocity(rollout, rows, zero, x).detach()
        x = x + delta
        for step in range(5):
            x = x + policy.velocity(rollout, rows, zero + step, x) * (sigmas[step + 1] - sigmas[step])
        value = Red().score_pixels(policy.decode_pixels(x), [], []).value
    expected = -value + 0.5 * delta.square().flatten(1).mean(1)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-4)
    # the graph of the plain loop is walked back with the adapter on, which no saved tensor depends on
    for own, other in zip(mine, torch.autograd.grad(expected.sum(), parameters), strict=True):
        torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(metrics["policy/moved"], delta.square().flatten(1).mean(1))


def test_start_noise_is_standard_normal_before_it_has_learned() -> None:
    network = StartNoise(4, 6)
    mean, std = network(torch.randn(3, 6), torch.Size((3, 4, 8, 8)))
    assert not mean.any() and (std == 1).all()
    nn_out = network.net[-1]
    torch.nn.init.normal_(nn_out.weight)
    mean, std = network(torch.randn(3, 6), torch.Size((3, 4, 5, 8, 6)))
    assert mean.shape == (3, 4, 5, 8, 6) and mean.abs().max() <= 1.5 and std.log().abs().max() <= 1.5
    # a video's frames have the same
    assert torch.equal(mean[:, :, 0], mean[:, :, 4]) and not torch.equal(mean[0], mean[1])
    expected = kl_divergence(Normal(mean, std), Normal(0.0, 1.0)).flatten(1).mean(1)
    torch.testing.assert_close(standard_normal_kl(mean, std), expected)


def test_dsrl_is_a_policy_gradient_of_the_start_noise(tmp_path) -> None:
    """Samples are the plain pipeline's before training; then a noise's density rises with its advantage."""
    own = ["training.previews=0", "algorithm={name: dsrl, kl_weight: 0.1}", "rollout.order=1"]
    run = small_run("tiny_sd3/dsrl", tmp_path, *own, reward=Red())
    experience, policy, network = collected(run), run.policy, run.algorithm.network
    rollout = experience.rollout
    assert torch.equal(rollout.trajectory.latents[:, 0], plain(run, experience.batch.seeds))
    policy.start_noise, kept = None, policy.start_noise
    untouched = policy.sample(experience.batch.prompts, experience.batch.seeds, **run.config.rollout.arguments())
    policy.start_noise = kept
    assert torch.equal(rollout.trajectory.final, untouched.trajectory.final)
    # from somewhere else
    torch.nn.init.normal_(network.net[-1].weight, std=0.1)
    experience = collected(run)
    loss, metrics = run.algorithm.losses(policy, experience, experience.items)
    mine = torch.autograd.grad(loss.sum(), list(network.parameters()), allow_unused=True)
    noise = experience.rollout.trajectory.latents[:, 0]
    mean, std = network(policy.prompt_vectors(experience.batch.prompts), noise.shape)
    density = Normal(mean, std).log_prob(noise).flatten(1).mean(1)
    kl = kl_divergence(Normal(mean, std), Normal(0.0, 1.0)).flatten(1).mean(1)
    literal = (-experience.advantage[:, 0] * density + 0.1 * kl).sum()
    for own_, other in zip(mine, torch.autograd.grad(literal, list(network.parameters())), strict=True):
        torch.testing.assert_close(own_, other, atol=1e-6, rtol=1e-3)
    assert torch.equal(metrics["policy/ratio"], torch.ones(4)) and (metrics["policy/kl"] > 0).all()
    assert experience.advantage.any() and not run.algorithm.replay(policy, experience, experience.items, True).any()
    # samples without an advantage keep their divergence
    experience.advantage.zero_()
    assert len(run.learner._with_gradient(experience, experience.items)) == len(experience.items)
    # the generator stays as it was
    run.train()
    assert all(not p.any() for name, p in policy.trainable().items() if "lora_B" in name)
    assert "start_noise.net.1.weight" in run.learner.state()[0]["trainable"]


def test_what_would_hide_the_noise_is_refused() -> None:
    for name, override, message in (
        ("dsrl", "rollout.kernel=flow_sde", "ode works"),
        ("dsrl", "model.lora=null", "{rank: 1}"),
        ("hypernoise", "model.lora=null", "{rank: 32} works"),
        ("hypernoise", "model.gradient_checkpointing=true", "false works"),
        ("hypernoise", "algorithm.kl_weight=0.1", "move_weight holds the noise"),
        ("dsrl", "rollout.share_start_noise=true", "would all be the same"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(recipe(f"tiny_sd3/{name}"), [override]).check(1)


@pytest.mark.parametrize("name", ["dsrl", "hypernoise"])
def test_a_finished_run_samples_from_the_noise_that_it_learned(name: str, tmp_path) -> None:
    own = ["training.previews=0", "training.checkpoint_every=1", "training.optimizer.learning_rate=0.05"]
    run = small_run(f"tiny_sd3/{name}", tmp_path, *own, reward=Red())
    run.train()
    policy, _ = load_for_sampling(str(run.folder), None, "float32")
    base, _ = load_for_sampling(str(run.folder), None, "float32", trained=False)
    pictures = [each.sample("a red circle", [3], steps=5).trajectory.final for each in (run.policy, policy, base)]
    torch.testing.assert_close(pictures[1], pictures[0], atol=1e-6, rtol=0)
    assert (pictures[2] - pictures[0]).abs().max() > 1e-3
