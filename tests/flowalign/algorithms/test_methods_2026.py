"""Methods of 2026: against their authors' code (core/originals/README.md), or their equations written out."""

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowalign.config import load, recipe
from flowalign.core.advantages import group_advantage
from flowalign.core.credit import most_varied
from flowalign.core.losses import clipped_policy_loss
from flowalign.errors import ConfigError
from flowalign.rollouts.draw import Draw
from samplers import Trajectory, flow_sde, linear_sde, step_sensitivity, transition
from tests.flowalign.algorithms.matching.made_points import gradient, method, points
from tests.flowalign.small_run import small_run

RECORDED = json.loads((Path(__file__).parents[1] / "core" / "originals" / "methods_2026.json").read_text())
GIVEN = {name: torch.tensor(values) for name, values in RECORDED["inputs"].items()}
SIGMAS, STEPS = GIVEN["sigmas"], GIVEN["steps"]


def test_flash_grpos_loss_is_its_authors() -> None:
    velocity = GIVEN["velocity"].clone().requires_grad_()
    eta = SIGMAS[1].expand(5)
    made = transition(
        linear_sde, GIVEN["x"], velocity, SIGMAS[STEPS], SIGMAS[STEPS + 1], eta[STEPS], next=GIVEN["next"]
    )
    scale = (1 / step_sensitivity(linear_sde, SIGMAS, eta))[STEPS]
    torch.testing.assert_close(scale, torch.tensor(RECORDED["flash_grpo"]["scale"]))
    old = (made.log_prob + GIVEN["moved"]).detach()
    loss = (clipped_policy_loss(made.log_prob, old, GIVEN["advantage"] * scale / scale.mean(), 1e-3, 1e-3)).mean()
    assert loss.item() == pytest.approx(RECORDED["flash_grpo"]["loss"], rel=1e-5)
    (own,) = torch.autograd.grad(loss, velocity)
    torch.testing.assert_close(own, torch.tensor(RECORDED["flash_grpo"]["gradient"])[:, :, 0], atol=1e-6, rtol=1e-4)


def test_flash_grpo_learns_one_step_a_prompt_at_one_scale(tmp_path: Path) -> None:
    """With its weight the gradient of every action's log-probability has the size of its noise times its advantage."""
    run = small_run("tiny_sd3/flash_grpo", tmp_path, "training.group_size=4", "training.prompts_per_iteration=6")
    experience = run.collect(Draw(run.sampler, run.scorer, run.groups.draw(0).batch))
    trajectory = experience.rollout.trajectory
    rows, steps = experience.items.unbind(1)
    assert rows.tolist() == list(range(24)) and len(set(steps.tolist())) > 1
    assert (steps.view(6, 4) == steps.view(6, 4)[:, :1]).all()
    weight = experience.loss_weight[rows, steps]
    assert weight.mean().item() == pytest.approx(1, abs=1e-5)
    velocity = trajectory.velocity[rows, steps].clone().requires_grad_()
    made = trajectory.score(experience.rollout.kernel, velocity, rows, steps)
    (moved,) = torch.autograd.grad((weight * made.log_prob).sum(), velocity)
    noise = (made.next - made.mean) / made.std
    size = moved.flatten(1).norm(dim=1) / noise.flatten(1).norm(dim=1)
    torch.testing.assert_close(size, size[:1].expand(24), rtol=1e-3, atol=0)


def flow_opd(mode: str, **settings: Any) -> Any:
    return method("flow_opd", mode=mode, teachers=[{"guidance": 3.0}], **settings)


def taught(moved: torch.Tensor) -> Any:
    """Each row's recorded step, made by the student of the record and asked of a teacher and an anchor."""
    x, count = GIVEN["x"], len(STEPS)
    latents = torch.zeros(count, 6, *x.shape[1:])
    rows = torch.arange(count)
    latents[rows, STEPS], latents[rows, STEPS + 1] = x, GIVEN["next"]
    trajectory = Trajectory(
        latents=latents,
        velocity=torch.zeros(count, 5, *x.shape[1:]),
        log_prob=torch.zeros(count, 5),
        eta=torch.full((count, 5), 0.7),
        sigmas=SIGMAS,
    )
    velocity = GIVEN["velocity"].clone().requires_grad_()
    trajectory.log_prob[rows, STEPS] = trajectory.score(flow_sde, velocity, rows, STEPS).log_prob.detach() + moved
    sides = {"x0": x, "noise": x, "sigma": SIGMAS[STEPS], "advantage": torch.zeros(count), "old": x}
    at = points(velocity, reference=GIVEN["anchor"], **sides)
    at.noised = replace(at.noised, samples=rows, level_index=STEPS)
    at.rollout = SimpleNamespace(trajectory=trajectory, kernel=flow_sde)  # type: ignore[assignment]
    at.taught = GIVEN["taught"]
    return at


@pytest.mark.parametrize("mode", ["kl_only", "gkd"])
def test_flow_opds_losses_are_its_authors(mode: str) -> None:
    algorithm, at = flow_opd(mode), taught(GIVEN["moved"])
    losses = algorithm.loss(at)[0] + algorithm.penalized(torch.zeros(len(STEPS)), at)[0]
    recorded = RECORDED["flow_opd"][mode]
    torch.testing.assert_close(losses, torch.tensor([row["loss"] for row in recorded]), rtol=1e-4, atol=1e-6)
    expected = torch.tensor([row["gradient"] for row in recorded])
    torch.testing.assert_close(gradient(algorithm, at)[1], expected, rtol=1e-3, atol=1e-6)


def test_flow_opds_policy_gradient_teaches_by_its_advantages_gradient() -> None:
    """Over the noise of the step that was drawn, the mean gradient of `kl_only` is that of the gap alone."""
    torch.manual_seed(0)
    means, wanted = [], gradient(flow_opd("gkd", kl_weight=0.0), taught(torch.zeros(8)))[1]
    for _ in range(400):
        at = taught(torch.zeros(8))
        rows, trajectory = torch.arange(8), at.rollout.trajectory
        step = trajectory.score(flow_sde, GIVEN["velocity"], rows, STEPS)
        trajectory.latents[rows, STEPS + 1] = step.mean + step.std * torch.randn_like(step.mean)
        trajectory.log_prob[rows, STEPS] = trajectory.score(flow_sde, GIVEN["velocity"], rows, STEPS).log_prob
        means.append(gradient(flow_opd("kl_only", kl_weight=0.0), at)[1])
    made = torch.stack(means)
    error = made.std(0) / 20
    assert ((made.mean(0) - wanted).abs() < 5 * error + 1e-7).all()
    # the part with mean 0 is noise of about the size of what is learned
    assert made.std(0).mean() > 0.2 * wanted.abs().mean()


def test_flow_opd_asks_each_prompts_teacher_and_the_anchor(tmp_path: Path) -> None:
    anchor = ["algorithm.anchor={path: tiny_sd3}", "algorithm.kl_weight=0.5", "algorithm.mode=kl_only"]
    run = small_run("tiny_sd3/flow_opd", tmp_path, "training.group_size=2", *anchor, whole=True)
    experience = run.collect(Draw(run.sampler, run.scorer, run.groups.draw(0).batch))
    with torch.no_grad():
        for parameter in run.learner.parameters.values():
            parameter.add_(0.02 * torch.randn_like(parameter))
    loss, values = run.algorithm.losses(run.policy, experience, experience.items)
    own = run.algorithm.points(run.policy, experience, experience.items)
    # the anchor is another copy of the start weights
    with torch.no_grad(), run.policy.reference():
        start = run.policy.velocity_of(experience.clean, own.noised)
    torch.testing.assert_close(own.reference, start, atol=1e-5, rtol=0)
    gap, anchored = (run.algorithm.gap(own, velocity) for velocity in (own.taught, start))
    expected = (gap * values["policy/ratio"]).clamp(min=0) + 0.5 * anchored
    clipped = gap * values["policy/ratio"].clamp(1 - 1e-4, 1 + 1e-4) + 0.5 * anchored
    torch.testing.assert_close(loss, torch.maximum(expected, clipped), rtol=1e-4, atol=1e-6)


def test_stepwise_flow_grpo_normalises_the_gains_of_a_few_ode_steps_together(tmp_path: Path) -> None:
    """Its equations written out: r of a few Euler steps from every state, g = r' - r, (g - mean) / std of a prompt."""
    own = ["training.group_size=4", "rollout.plan={name: all}"]
    run = small_run("tiny_sd3/stepwise_flow_grpo", tmp_path, *own, whole=True)
    experience = run.collect(Draw(run.sampler, run.scorer, run.groups.draw(0).batch))
    rollout, batch, count = experience.rollout, experience.batch, 2
    latents, sigmas = rollout.trajectory.latents, rollout.trajectory.sigmas
    rewards = []
    for state in range(6):
        x, near = latents[:, state], state
        for leap in range(count if state < 5 else 0):
            # near-equal leaps between points of the schedule
            far = state + round((leap + 1) * (5 - state) / min(count, 5 - state))
            if far > 5 or near == far:
                continue
            with torch.no_grad():
                v = run.policy.at(rollout)(x, torch.arange(16), torch.full((16,), near))
            x, near = x + (sigmas[far] - sigmas[near]) * v, far
        end = replace(rollout, trajectory=replace(rollout.trajectory, latents=x[:, None]))
        rewards.append(run.scorer.score(run.sampler.decode(end), batch).value)
    gains = torch.stack(rewards, 1).diff(dim=1)[:, :4]
    for prompt in range(4):
        rows = slice(4 * prompt, 4 * prompt + 4)
        expected = (gains[rows] - gains[rows].mean()) / (gains[rows].std(unbiased=False) + 1e-4)
        torch.testing.assert_close(experience.advantage[rows, :4].cpu(), expected, atol=1e-3, rtol=1e-3)
    assert not experience.advantage[:, 4].any() and gains.std() > 0.05


def predicted(run: Any, experience: Any) -> torch.Tensor:
    """[B, T] rewards of the pictures that the state after each step predicts in one step."""
    rollout, rewards = experience.rollout, []
    trajectory = rollout.trajectory
    for state in range(1, 6):
        x = trajectory.latents[:, state]
        if state < 5:
            x = x - trajectory.sigmas[state] * trajectory.velocity[:, state]
        end = replace(rollout, trajectory=replace(trajectory, latents=x[:, None]))
        rewards.append(run.scorer.score(run.sampler.decode(end), experience.batch).value)
    return torch.stack(rewards, 1)


def test_vgpo_weighs_steps_by_what_later_pictures_are_worth(tmp_path: Path) -> None:
    """Its equations written out, row by row, for values Q and the advantage of Q."""
    run = small_run("tiny_sd3/vgpo", tmp_path, "training.group_size=4", "rollout.plan={name: all}")
    experience = run.collect(Draw(run.sampler, run.scorer, run.groups.draw(0).batch))
    rewards, made = predicted(run, experience).tolist(), experience.advantage.cpu()
    value = [[sum(0.9**j * row[k + j] for j in range(5 - k)) for k in range(5)] for row in rewards]
    for prompt in range(4):
        rows = range(4 * prompt, 4 * prompt + 4)
        mean = [sum(value[row][k] for row in rows) / 4 for k in range(4)]
        for k in range(4):
            std = (sum((value[row][k] - mean[k]) ** 2 for row in rows) / 4) ** 0.5
            for row in rows:
                dual = (value[row][k] - mean[k]) / (std + 1e-4) + 0.1 * value[row][k]
                assert made[row, k].item() == pytest.approx(4 * mean[k] / sum(mean) * dual, abs=1e-3)
    assert not made[:, 4].any() and (made[:, 1] != made[:, 2]).any()


def test_tafs_grpo_rewards_each_steps_next_picture(tmp_path: Path) -> None:
    run = small_run("tiny_sd3/tafs_grpo", tmp_path, "training.group_size=4")
    experience = run.collect(Draw(run.sampler, run.scorer, run.groups.draw(0).batch))
    rewards, trajectory = predicted(run, experience), experience.rollout.trajectory
    for prompt in range(4):
        rows = slice(4 * prompt, 4 * prompt + 4)
        for step in range(4):
            expected = group_advantage(rewards[rows, step], torch.zeros(4), clip=5.0)
            torch.testing.assert_close(experience.advantage[rows, step].cpu(), expected, atol=1e-3, rtol=1e-3)
    assert not experience.advantage[:, 4].any()
    # the next state is the predicted picture, brought to its level by noise of which less and less is fresh
    x0 = trajectory.latents[:, 0] - trajectory.sigmas[0] * trajectory.velocity[:, 0]
    noise = (trajectory.latents[:, 1] - (1 - trajectory.sigmas[1]) * x0) / trajectory.sigmas[1]
    assert noise.std().item() == pytest.approx(1, abs=0.1)
    eta = trajectory.eta[0].tolist()
    assert eta == pytest.approx([0.9, 0.825, 0.675, 0.6, 0])
    with pytest.raises(ConfigError, match="cps works"):
        load(recipe("tiny_sd3/tafs_grpo"), ["rollout.kernel=flow_sde"]).check(processes=1)


def test_the_members_that_vary_most_are_those_of_all_choices() -> None:
    torch.manual_seed(3)
    for _ in range(20):
        reward, group = torch.randn(14).round(decimals=1), torch.tensor([1] * 8 + [0] * 6)
        chosen = most_varied(reward, group, 4)
        for number in (0, 1):
            rows = reward[group == number]
            best = max(rows[list(choice)].var(correction=0) for choice in combinations(range(len(rows)), 4))
            assert chosen[group == number].sum() == 4
            assert rows[chosen[group == number]].var(correction=0) == pytest.approx(best.item(), abs=1e-6)


def test_pro_grpo_ends_trajectories_by_their_predicted_pictures(tmp_path: Path) -> None:
    """What goes on is what it would have been in the whole group, and what it is chosen by is literal."""
    run = small_run("tiny_sd3/pro_grpo", tmp_path, "training.group_size=6", "algorithm.prune={2: 0.8, 3: 0.5}")
    batch = run.groups.draw(0).batch
    rollout, left = run.algorithm.rollout(run.sampler, batch)
    whole = run.sampler.rollout(batch)
    assert len(rollout) == len(left) == 4 * 3
    rows = list(range(24))
    for step, size in ((2, 5), (3, 3)):
        trajectory, at = whole.trajectory, torch.tensor(rows)
        latents = trajectory.latents[at, step] - trajectory.sigmas[step] * trajectory.velocity[at, step]
        end = replace(whole.take(at), trajectory=replace(trajectory.take(at), latents=latents[:, None]))
        reward = run.scorer.score(run.sampler.decode(end), batch, rows).value
        kept = most_varied(reward, torch.tensor(batch.group)[at], size)
        rows = [row for row, stays in zip(rows, kept.tolist(), strict=True) if stays]
    assert left.seeds == [batch.seeds[row] for row in rows] and left.group == [batch.group[row] for row in rows]
    torch.testing.assert_close(rollout.trajectory.latents, whole.trajectory.latents[rows], atol=1e-4, rtol=0)
    torch.testing.assert_close(rollout.log_prob, whole.log_prob[rows], atol=1e-4, rtol=0)
    assert run.policy.verify(rollout) < 1e-4 and not rollout.trajectory.latents.requires_grad
    experience = run.collect(Draw(run.sampler, run.scorer, batch))
    reward, group = experience.scores.value, torch.tensor(left.group)
    torch.testing.assert_close(experience.advantage[:, 0].cpu(), group_advantage(reward, group, clip=5.0))
    with pytest.raises(ConfigError, match="6 to 6"):
        load(recipe("tiny_sd3/pro_grpo"), ["training.group_size=6", "algorithm.prune={2: 0.99}"]).check(processes=1)
