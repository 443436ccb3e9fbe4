"""Step pairs: D3PO, SPO with LPO's settings, and PRDP, against their authors' code and closed forms."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler

from flowalign.algorithms.trajectory.spo import SPO, SPOSettings
from flowalign.config import load, recipe
from flowalign.core.credit import preferred
from flowalign.core.step_losses import reward_difference_loss, step_preference_loss
from flowalign.data.batches import draw_batch
from flowalign.errors import ConfigError
from flowalign.rollouts.draw import Draw
from samplers.kernels import ddim_published
from tests.flowalign.small_run import small_run

# recorded by core/originals/record_pairs.py, as README.md there says
THEIRS = json.loads((Path(__file__).parents[2] / "core" / "originals" / "step_pairs.json").read_text())
GIVEN = {name: torch.tensor(values, dtype=torch.float64) for name, values in THEIRS["inputs"].items()}
SMALL = ("training.prompts_per_iteration=2", "training.group_size=4", "rollout.plan={name: all}")


def close(made: torch.Tensor, expected: Any) -> None:
    torch.testing.assert_close(made, torch.as_tensor(expected, dtype=made.dtype), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("name", "beta"), [("d3po", 0.1), ("spo", 10.0), ("lpo", 500.0)])
def test_loss_and_gradient_are_the_authors(name: str, beta: float) -> None:
    # at LPO's beta their sigmoid is 0 where log-ratios are as far apart as the others'
    given = {key: value * (0.2 if name == "lpo" else 1) for key, value in GIVEN.items()}
    own = [given[f"total_prob_{i}"].clone().requires_grad_() for i in (0, 1)]
    first, second = (p - given[f"total_ref_prob_{i}"] for i, p in enumerate(own))
    # SPO and LPO put the better step first; D3PO's h says which it is
    ahead = torch.ones(12)
    if name == "d3po":
        ahead = (GIVEN["rewards"][0] - GIVEN["rewards"][1]).sign()
    better, worse = torch.where(ahead > 0, first, second), torch.where(ahead > 0, second, first)
    losses, _ = step_preference_loss(better, worse, beta, 0.1)
    # their ties are log 2 without a gradient
    loss = losses.where(ahead != 0, math.log(2)).mean()
    loss.backward()
    close(loss, THEIRS[name]["loss"])
    close(torch.stack([p.grad for p in own]), THEIRS[name]["gradients"])


def test_best_and_worst_and_the_threshold_are_the_authors() -> None:
    reward = GIVEN["scores"][None]
    for name, threshold in (("spo", 0.3), ("lpo", torch.tensor(THEIRS["lpo"]["threshold"]))):
        best, worst, valid = preferred(reward, threshold)
        assert [best[0].tolist(), worst[0].tolist()] == THEIRS[name]["indices"]
        assert valid[0].tolist() == THEIRS[name]["valid"]
        assert 0 < valid.sum() < 20


def test_lpos_threshold_follows_the_noise_of_stable_diffusions_steps() -> None:
    scheduler = DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1)
    scheduler.set_timesteps(20)
    signal = scheduler.alphas_cumprod[scheduler.timesteps]
    alpha, std = signal.sqrt(), (1 - signal).sqrt()
    sigmas = torch.cat([std / (alpha + std), torch.zeros(1)])
    algorithm = SPO(SPOSettings(threshold=(0.35, 0.5)))
    eta = torch.ones(1, 20)
    rollout = SimpleNamespace(kernel=ddim_published, mask=eta > 0, trajectory=SimpleNamespace(sigmas=sigmas, eta=eta))
    # their table has four digits, and timestep 0 at the end of its last step
    torch.testing.assert_close(
        algorithm.threshold(rollout), torch.tensor(THEIRS["lpo"]["threshold"]), atol=2e-4, rtol=0
    )


def test_at_the_start_the_gradient_is_half_of_beta_and_outside_the_band_exactly_zero() -> None:
    beta, clip_range = 8.0, 0.1
    # start, both alike, both inside, the better outside, the worse outside, both outside
    better = torch.tensor([0.0, 0.05, 0.02, 0.2, 0.0, -0.3], requires_grad=True)
    worse = torch.tensor([0.0, 0.05, -0.03, 0.0, 0.1, 0.3], requires_grad=True)
    losses, logit = step_preference_loss(better, worse, beta, clip_range)
    losses.sum().backward()
    close(losses[:2], [math.log(2)] * 2)
    close(better.grad[:2], [-beta / 2] * 2)
    close(worse.grad[:2], [beta / 2] * 2)
    close(better.grad[2], -beta * torch.sigmoid(-logit[2].detach()))
    assert better.grad[3] == 0 and worse.grad[3] > 0
    assert worse.grad[4] == 0 and better.grad[4] < 0
    assert better.grad[5] == 0 and worse.grad[5] == 0
    close(logit[5].detach(), beta * (math.log(0.9) - math.log(1.1)))


def test_the_policys_gradient_at_the_start_is_that_of_the_two_log_probabilities(tmp_path: Path) -> None:
    run = small_run("tiny_sd3/d3po", tmp_path, *SMALL, "algorithm.beta=6")
    batch = draw_batch(run.prompts, 0, 2, 4, 0, share_start_noise=True)
    experience = run.collect(Draw(run.sampler, run.scorer, batch))
    weights = list(run.learner.parameters.values())
    counted = experience.counted(experience.items)
    better, worse, steps = experience.items[counted][0]
    reward = experience.scores.value
    assert reward[better] == reward[better // 4 * 4 :][:4].max() > reward[worse]
    losses, values = run.algorithm.losses(run.policy, experience, experience.items[counted][:1])
    close(losses.detach(), [math.log(2)])
    assert values["policy/ratio"].item() == pytest.approx(1, abs=1e-6)
    made = torch.autograd.grad(losses.sum(), weights)
    log_prob = run.policy.score(experience.rollout, torch.stack([better, worse]), steps.repeat(2)).log_prob
    expected = torch.autograd.grad(-6 / 2 * (log_prob[0] - log_prob[1]), weights)
    for own, other in zip(made, expected, strict=True):
        torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-3)
    # equal rewards give no pair
    items, preference = run.algorithm.compared(torch.ones(2, 4, 5), experience.rollout)
    assert items.shape == (2, 4, 3) and not preference.any()


@pytest.fixture(scope="module")
def spo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A run of SPO, and the experience of its first iteration."""
    own = "training.previews=2", "algorithm.start=1"
    run = small_run("tiny_sd3/spo", tmp_path_factory.mktemp("spo"), *SMALL, *own)
    batch = draw_batch(run.prompts, 0, 2, 4, 0, share_start_noise=False)
    return run, run.collect(Draw(run.sampler, run.scorer, batch))


def test_spo_branches_at_every_state_and_goes_on_from_one_branch(spo: tuple[Any, Any]) -> None:
    run, experience = spo
    made = experience.rollout.trajectory
    # two trunks of five steps; three side branches after each of the steps 1 to 3
    assert run.policy.forwards == 2 * 5 + 2 * 3 * 3
    assert experience.items.shape == (2 * 3, 3) and run.algorithm.items(run.config) == 3
    # up to step 1 a group is one trajectory, then its members are apart
    latents = made.latents.unflatten(0, (2, 4))
    assert torch.equal(latents[:, :, :2], latents[:, :1, :2].expand_as(latents[:, :, :2]))
    assert all((latents[:, 0, k] - latents[:, m, k]).abs().amax() > 1e-2 for k in (2, 3, 4, 5) for m in (1, 2, 3))
    # what was recorded is what the weights say of the trunk's states, for the trunk's own steps too
    rows, steps = made.mask[:, 1:].nonzero().unbind(1)
    pairs = torch.cat([rows, rows]), torch.cat([steps, steps]) + 1
    with torch.no_grad():
        scored = run.algorithm.log_prob(run.policy, experience, *pairs)
        velocity = run.policy.velocity(experience.rollout, rows, steps + 1)
    close(scored.chunk(2)[0], made.log_prob[rows, steps + 1])
    torch.testing.assert_close(velocity, made.velocity[rows, steps + 1], atol=1e-4, rtol=0)
    # the last branches are finished by the ODE
    sigma = made.sigmas[4]
    torch.testing.assert_close(made.latents[:, 5], made.latents[:, 4] - sigma * made.velocity[:, 4])


def test_spo_judges_a_branch_by_its_predicted_picture(spo: tuple[Any, Any]) -> None:
    run, experience = spo
    made, rows = experience.rollout.trajectory, torch.arange(8)
    predicted = made.latents[:, 3] - made.sigmas[3] * made.velocity[:, 3]
    pictures = run.policy.decode_latents(experience.rollout.whole(predicted, rows), 8)
    reward = run.scorer.score(pictures, experience.batch).value
    close(experience.reward[:, 2], reward)
    close(experience.reward[:, 3], experience.scores.value)
    for better, worse, step in experience.items[experience.counted(experience.items)].tolist():
        group = experience.reward[better // 4 * 4 :, step][:4]
        assert experience.reward[better, step] == group.max() > group.min() == experience.reward[worse, step]
        assert experience.preference[better, step] == 1 and experience.preference[worse, step] == -1
    assert experience.preference.sum() == 0 and not experience.preference[:, [0, 4]].any()


def test_spo_collects_the_same_in_parts_and_shows_it(spo: tuple[Any, Any], tmp_path: Path) -> None:
    _, whole = spo
    split = small_run("tiny_sd3/spo", tmp_path, *SMALL, "algorithm.start=1", "rollout.overlap=2")
    batch = draw_batch(split.prompts, 0, 2, 4, 0, share_start_noise=False)
    parts = split.collect(Draw(split.sampler, split.scorer, batch))
    torch.testing.assert_close(parts.reward, whole.reward, atol=1e-5, rtol=0)
    assert torch.equal(parts.items, whole.items) and torch.equal(parts.preference, whole.preference)
    seen = split.algorithm.show(split.sampler, split.scorer, batch)
    assert len(seen.images) == 8 and torch.equal(seen.advantage.isnan(), ~seen.rollout.mask)


@pytest.mark.parametrize("name", ["d3po", "spo", "prdp"])
def test_the_first_update_has_ratio_one_and_moves_the_weights(name: str, tmp_path: Path) -> None:
    run = small_run(f"tiny_sd3/{name}", tmp_path, *SMALL, "training.iterations=2")
    before = {key: value.detach().clone() for key, value in run.learner.parameters.items()}
    run.train()
    first, second = run.metrics.read()
    assert first["policy/ratio"] == pytest.approx(1, abs=1e-6) and first["preference/accuracy"] == 0.5
    assert second["policy/ratio"] != 1 and min(first["policy/gradient_norm"], second["policy/gradient_norm"]) > 0
    assert any(not torch.equal(before[key], value) for key, value in run.learner.parameters.items())
    if name != "prdp":
        assert 0 < first["preference/pairs"] <= 1


def test_prdp_finds_the_gaussian_that_maximises_reward_less_kl() -> None:
    """Of reward a x under N(0, s^2) with KL weight beta it is N(a s^2 / beta, s^2), and there the error is 0."""
    a, s, beta = 1.5, 0.7, 2.0
    x = s * torch.randn(64, 2, 1)
    reward, mean = a * x[..., 0], torch.zeros((), requires_grad=True)

    def log_ratio(to: torch.Tensor) -> torch.Tensor:
        return (x**2 - (x - to) ** 2) / (2 * s**2)

    old = torch.zeros(64, 2, 1)
    for _ in range(200):
        loss = reward_difference_loss(reward, log_ratio(mean), old, beta, 1e3).mean()
        (gradient,) = torch.autograd.grad(loss, mean)
        mean = (mean - 0.02 * gradient).detach().requires_grad_()
    close(mean.detach(), a * s**2 / beta)
    close(reward_difference_loss(reward, log_ratio(mean), old, beta, 1e3).detach(), torch.zeros(64))


def test_prdp_is_still_at_equal_rewards_and_goes_no_further_than_its_clip() -> None:
    start = torch.zeros(3, 2, 4, requires_grad=True)
    equal = reward_difference_loss(torch.ones(3, 2), start, torch.zeros(3, 2, 4), 5.0, 0.1)
    assert not equal.detach().any() and not torch.autograd.grad(equal.sum(), start)[0].any()
    reward = torch.tensor([[1.0, 0.0]] * 3)
    # at the start; moved too far towards the reward; moved away from it
    moved = torch.tensor([0.0, 0.02, -0.02]).view(3, 1, 1) * torch.tensor([1.0, -1.0]).view(1, 2, 1)
    log_ratio = moved.expand(3, 2, 4).clone().requires_grad_()
    loss = reward_difference_loss(reward, log_ratio, torch.zeros(3, 2, 4), 5.0, 0.01)
    (gradient,) = torch.autograd.grad(loss.sum(), log_ratio)
    # -2 beta (r_0 - r_1) and its opposite
    close(gradient[0], torch.tensor([-10.0, 10.0]).view(2, 1).expand(2, 4))
    assert not gradient[1].any()
    close(gradient[2, 0], torch.full((4,), -2 * 5 * (1 + 5 * 8 * 0.02)))


def test_prdp_learns_from_neighbours_whole_trajectories(tmp_path: Path) -> None:
    run = small_run("tiny_sd3/prdp", tmp_path, *SMALL)
    batch = draw_batch(run.prompts, 0, 2, 4, 0, share_start_noise=True)
    experience = run.collect(Draw(run.sampler, run.scorer, batch))
    assert (
        experience.items.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]] and experience.counted(experience.items) is None
    )
    reward = experience.scores.value
    losses, _ = run.algorithm.losses(run.policy, experience, experience.items)
    close(losses.detach(), (reward[::2] - reward[1::2]) ** 2)
    close(experience.preference[:, 0].view(-1, 2)[:, 0], reward[::2] - reward[1::2])


@pytest.mark.parametrize(
    ("name", "override", "says"),
    [
        ("prdp", "training.group_size=5", "training.group_size: prdp compares .* two by two; 6 works"),
        ("spo", "algorithm.start=4", "algorithm.start: no step from 4 on draws noise .* at most 2 works"),
        ("spo", "algorithm.threshold=1.5", "algorithm.threshold"),
        ("d3po", "rollout.kernel=ode", "adds no noise at step 1"),
        ("d3po", "algorithm.advantage={name: grpo}", "algorithm.advantage: unknown key"),
        ("d3po", "training.old_log_prob=replayed", "training.old_log_prob: 'd3po' has no ratios"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(name: str, override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(recipe(f"tiny_sd3/{name}"), [override]).check(processes=1)
