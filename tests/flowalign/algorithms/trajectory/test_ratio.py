"""What all methods of the family can take: GRPO-Guard's ratio, a share of the steps, old samples, another reference."""

import math
from pathlib import Path

import pytest
import torch
from torch.distributions import Independent, Normal, kl_divergence

from flowalign.config import load, recipe
from flowalign.data.batches import draw_batch
from flowalign.errors import ConfigError
from flowalign.rollouts.draw import Draw
from tests.flowalign.small_run import small_run


def test_the_guarded_loss_is_the_one_that_its_authors_write_out(tmp_path: Path) -> None:
    """As in Pref-GRPO's train_flux.py, 751-784 of 3e787f6: the loss over dt, the KL beside it."""
    own = ["algorithm.ratio=guard", "algorithm.step_fraction=0.5", "algorithm.loss.clip_range=1e-6"]
    run = small_run("tiny_sd3/flow_grpo", tmp_path, *own, "training.prompts_per_iteration=2", "algorithm.kl_weight=0.1")
    algorithm, policy = run.algorithm, run.policy
    batch = run.groups.draw(0).batch
    experience = run.collect(Draw(run.sampler, run.scorer, batch))
    trajectory, taught = experience.rollout.trajectory, experience.advantage.ne(0)
    steps = int(trajectory.mask[0].sum())
    groups_with_spread = taught.any(1)
    assert groups_with_spread.any() and set(taught[groups_with_spread].sum(1).tolist()) == {steps // 2}
    # the mean over all steps is the one over those that are learned from
    algorithm.settings = algorithm.settings.model_copy(update={"step_fraction": 1.0})
    whole = run.collect(Draw(run.sampler, run.scorer, batch)).advantage
    torch.testing.assert_close(experience.advantage.sum(1), whole.sum(1))
    with torch.no_grad():
        for parameter in run.learner.parameters.values():
            parameter.add_(0.02 * torch.randn_like(parameter))
    items = experience.items
    loss, metrics = algorithm.losses(policy, experience, items)
    made = algorithm.actions(policy, experience, items)
    dt, std = -made.dt, made.transition.std.flatten()
    bias = (made.transition.mean - made.mean_old).square().flatten(1).mean(1) / (2 * std**2)
    ratio = ((made.log_prob - made.old_log_prob + bias) * std).exp()
    plain, clipped = -made.advantage * ratio, -made.advantage * ratio.clamp(1 - 1e-6, 1 + 1e-6)
    expected = torch.maximum(plain, clipped) / dt + 0.1 * metrics["policy/kl"]
    assert (ratio - 1).abs().max() > 1e-6
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("level", "rule"), [("token", "truncate"), ("sequence", "mask")])
def test_steps_that_earlier_weights_drew_are_weighed_and_ratios_refer_to_the_weights_of_now(
    level: str, rule: str, tmp_path: Path
) -> None:
    largest = 1.002
    settings = f"algorithm.off_policy={{level: {level}, rule: {rule}, largest: {largest}}}"
    run = small_run("tiny_sd3/flow_grpo", tmp_path, settings, "algorithm.kl_weight=0")
    batch = draw_batch(run.prompts, 0, 4, 4, 0, share_start_noise=False)
    earlier = run.sampler.rollout(batch)
    recorded = earlier.log_prob.clone()
    torch.manual_seed(0)
    with torch.no_grad():
        for weights in run.learner.parameters.values():
            weights += 0.02 * torch.randn_like(weights)
    run.sampler.rollout = lambda _: earlier
    experience = run.collect(Draw(run.sampler, run.scorer, batch))
    assert torch.equal(earlier.log_prob, recorded)
    samples, steps = earlier.mask.nonzero().unbind(1)
    now = torch.zeros_like(recorded)
    with torch.no_grad():
        for i in range(len(batch)):
            own = samples == i
            now[i, steps[own]] = run.policy.score(earlier, samples[own], steps[own]).log_prob
    torch.testing.assert_close(experience.rollout.log_prob, now, atol=1e-6, rtol=0)
    weight = torch.zeros_like(now)
    for i, step in earlier.mask.nonzero().tolist():
        at = [step] if level == "token" else earlier.mask[i].nonzero().flatten().tolist()
        ratio = math.prod(math.exp(now[i, j] - recorded[i, j]) for j in at)
        weight[i, step] = min(ratio, largest) if rule == "truncate" else ratio * (ratio <= largest)
    drawn = weight[earlier.mask]
    assert drawn.max() > drawn.min() and (drawn.max() == pytest.approx(largest) or not drawn.all())
    losses, values = run.algorithm.losses(run.policy, experience, experience.items)
    expected = -(experience.advantage * weight)[samples, steps]
    torch.testing.assert_close(losses.detach(), expected, atol=1e-4, rtol=1e-4)
    assert (values["policy/ratio"] - 1).abs().max() < 1e-5
    row = (weight * earlier.mask).sum(1) / earlier.mask.sum(1)
    assert experience.metrics["policy/off_policy_weight"] == pytest.approx(row.mean().item(), abs=1e-5)


def test_the_divergence_is_from_a_snapshot_that_follows(tmp_path: Path) -> None:
    own = ["algorithm.kl_weight=0.1", "algorithm.kl_reference=recent", "training.prompts_per_iteration=2"]
    own += ["training.snapshots={recent: {decay: 0.5}}", "training.optimizer.learning_rate=2.0e-2"]
    run = small_run("tiny_sd3/flow_grpo", tmp_path, *own)
    assert not run.algorithm.uses_reference, "no copy of the start weights is kept"
    assert run.iterate()["policy/gradient_norm"] > 0
    run.iteration += 1
    experience = run.experience()
    items, trajectory, kernel = experience.items, experience.rollout.trajectory, experience.rollout.kernel
    samples, steps = items.unbind(1)
    # of a group whose rewards are all alike
    experience.advantage[experience.group == experience.group[0]] = 0
    steady = experience.advantage[samples, steps] == 0
    # the divergence of samples without an advantage counts too
    assert len(run.learner._with_gradient(experience, items)) == len(items) > steady.sum() > 0

    def normal() -> Independent:
        velocity = run.policy.velocity(experience.rollout, samples, steps)
        step = trajectory.score(kernel, velocity, samples, steps)
        return Independent(Normal(step.mean, step.std.expand_as(step.mean)), 3)

    with torch.no_grad():
        with run.policy.snapshot("recent"):
            before = normal()
        expected = kl_divergence(normal(), before) / before.event_shape.numel()
        loss, values = run.algorithm.losses(run.policy, experience, items)
    assert expected.min() > 0
    torch.testing.assert_close(values["policy/kl"], expected, atol=0, rtol=1e-3)
    torch.testing.assert_close(loss[steady], 0.1 * expected[steady], atol=0, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "reference", "says"),
    [
        ("flow_grpo", "rcent", "no snapshot 'rcent'; did you mean"),
        ("flow_grpo", "recent", "set algorithm.kl_weight too"),
        ("dsrl", "recent", "the divergence is from N(0, I)"),
    ],
)
def test_a_reference_without_an_effect_is_refused(name: str, reference: str, says: str) -> None:
    follow = "training.snapshots={recent: {decay: 0.5}}"
    config = load(recipe(f"tiny_sd3/{name}"), [f"algorithm.kl_reference={reference}", follow])
    with pytest.raises(ConfigError) as caught:
        config.check(processes=1)
    assert says in str(caught.value)
