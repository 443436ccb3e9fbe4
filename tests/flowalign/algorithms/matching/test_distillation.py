"""Distillation on the shipped tiny Stable Diffusion 3, against literal versions of the losses."""

from pathlib import Path

import pytest
import torch

from flowalign import registry
from flowalign.config import load, recipe
from flowalign.errors import ConfigError
from flowalign.rollouts.draw import Draw
from flowalign.training import Trainer
from tests.flowalign.small_run import small_run

FEW = [
    "training.prompts_per_iteration=2",
    "training.group_size=2",
    "training.optimizer.schedule=constant",
    # more updates than the fake learns alone; they are not made here
    "training.iterations=20",
]


def collected(name: str, folder: Path, *overrides: str, moved: bool = True) -> tuple[Trainer, object]:
    """A run and its first experience; with weights that have moved from the start."""
    run = small_run(f"tiny_sd3/{name}", folder, *FEW, *overrides, whole=True)
    experience = run.collect(Draw(run.sampler, run.scorer, run.groups.draw(0).batch))
    if moved:
        with torch.no_grad():
            for parameter in run.learner.parameters.values():
                parameter.add_(0.02 * torch.randn_like(parameter))
    return run, experience


def test_a_student_is_drawn_to_its_teachers_step_at_its_own_states(tmp_path: Path) -> None:
    """Of two teachers by prompt: the start weights under guidance, and another copy of the pipeline."""
    teachers = "[{guidance: 3.0, where: {category: [counting]}}, {path: tiny_sd3}]"
    run, experience = collected("opd", tmp_path, f"algorithm.teachers={teachers}", "data.where={}")
    owner, rollout = experience.owner, experience.rollout
    categories = [record["category"] for record in experience.batch.metadata]
    assert owner.tolist() == [0 if category == "counting" else 1 for category in categories]
    # rewards are measured alone: equal ones are no reason to warn
    assert experience.outcome() is None and experience.scores is None
    forwards = run.policy.forwards
    loss, _ = run.algorithm.losses(run.policy, experience, experience.items)
    # a student's and one or two branches of a teacher's, whichever network is asked
    count, guided = len(experience.items), int((owner[experience.items[:, 0]] == 0).sum())
    assert run.policy.forwards - forwards == 2 * count + guided
    sigmas = rollout.trajectory.sigmas
    for (sample, place), got in zip(experience.items.tolist(), loss.tolist(), strict=True):
        step = int(experience.level_index[sample, place])
        x, dt = rollout.trajectory.latents[[sample], step], sigmas[step + 1] - sigmas[step]
        guidance = 1.0 if owner[sample] else 3.0
        clean = run.policy.clean([experience.batch.prompts[sample]], x, [0], steps=5, sigmas=run.config.rollout.sigmas)
        own = run.policy.clean(
            [experience.batch.prompts[sample]], x, [0], steps=5, sigmas=run.config.rollout.sigmas, guidance=guidance
        )
        at = clean.noised(torch.tensor([0]), torch.tensor([step]), [0])
        with torch.no_grad():
            student = run.policy.velocity_of(clean, at, x)
            with run.policy.reference():
                teacher = run.policy.velocity_of(own, at, x)
        assert got == pytest.approx(float((dt * (student - teacher)).square().mean() / 2), rel=1e-3, abs=1e-7)
    with pytest.raises(ConfigError, match=r"teachers.0: without a path it is the start weights"):
        load(recipe("tiny_sd3/opd"), ["algorithm.teachers=[{guidance: 1.0}]"]).check(processes=1)


def test_with_noise_on_the_way_a_student_is_drawn_by_the_divergence_of_its_steps(tmp_path: Path) -> None:
    own = ["algorithm.stochastic=true", "rollout.kernel=flow_sde", "rollout.eta=0.7", "data.where={}"]
    run, experience = collected("opd", tmp_path, "algorithm.teachers=[{guidance: 3.0}]", *own)
    policy, trajectory = run.policy, experience.rollout.trajectory
    loss, _ = run.algorithm.losses(policy, experience, experience.items)
    noised = experience.noised(experience.items)
    at = noised.samples, noised.level_index
    with torch.no_grad():
        student = trajectory.score(experience.rollout.kernel, policy.velocity_of(experience.clean, noised), *at)
        with policy.reference():
            taught = trajectory.score(experience.rollout.kernel, policy.velocity_of(experience.lessons[0], noised), *at)
    noisy = student.std.flatten() > 0
    steps, teachers = (torch.distributions.Normal(made.mean[noisy], made.std[noisy]) for made in (student, taught))
    divergence = torch.distributions.kl_divergence(steps, teachers).flatten(1).mean(1)
    assert noisy.sum() > len(noisy) / 2
    torch.testing.assert_close(loss[noisy], divergence, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["dmd2", "tdm"])
def test_a_generator_moves_along_the_difference_of_two_scores(name: str, tmp_path: Path) -> None:
    """What `fake` learns by `fake_learns: state`, the Gaussian case says (test_distribution_matching.py)."""
    published = ["algorithm.fake_learns=prediction"] if name == "tdm" else []
    run, experience = collected(name, tmp_path, *published)
    algorithm, policy, items = run.algorithm, run.policy, experience.items
    state = experience.states(items)
    trajectory = experience.rollout.trajectory
    # the states are the trajectory's own
    torch.testing.assert_close(state.x, trajectory.latents[state.samples, state.level_index], atol=1e-5, rtol=0)
    x0 = state.clean(policy.velocity_of(experience.generator, state).detach())
    at = experience.noised(items)
    noise, t = at.noise, at.s
    noised = algorithm.diffused(experience, items, state, x0)
    if name == "tdm":
        sigma, after = (trajectory.sigmas[state.level_index + k].view_as(t) for k in (0, 1))
        assert (t > after).all()
        following = state.x + (after - sigma) * (state.x - x0) / sigma
        a = (1 - t) / (1 - after)
        wanted = a * following + (t**2 - (after * a) ** 2).sqrt() * noise
        torch.testing.assert_close(noised.x, wanted, atol=1e-4, rtol=0)
        # what `fake` learns there: from its x0 to the mixed noise
        torch.testing.assert_close(noised.velocity, (wanted - x0) / t, atol=1e-3, rtol=1e-3)
    else:
        torch.testing.assert_close(noised.x, (1 - t) * x0 + t * noise)
    # every update of `fake` has noise of its own, and levels of the same steps
    again = [algorithm.redrawn(experience, number).noised(items) for number in (0, 1)]
    assert not any(torch.isclose(one.noise, noise).any() for one in again) and not again[0].noise.equal(again[1].noise)
    torch.testing.assert_close(again[0].sigma.sort().values, at.sigma.sort().values)
    assert (again[0].sigma != at.sigma).any()
    # which is held to the teacher where that is asked
    free = algorithm.role_losses("fake", policy, experience, items)[0]
    algorithm.settings = algorithm.settings.model_copy(update={"fake_to_teacher": 0.5})
    held = algorithm.role_losses("fake", policy, experience, items)[0]
    learned = algorithm.diffused(experience, items, state, state.x0)
    with torch.no_grad():
        velocity = policy.velocity_of(experience.clean, learned)
        with policy.reference():
            apart = velocity - policy.velocity_of(experience.clean, learned)
    expected = 0.5 * apart.square().flatten(1).mean(1).view(len(items), -1).mean(1)
    assert expected.min() > 1e-5
    torch.testing.assert_close(held - free, expected, rtol=1e-2, atol=1e-6)
    # the gradient in the generator's x0
    leaf = {}
    original = state.__class__.clean

    def clean(self: object, velocity: torch.Tensor) -> torch.Tensor:
        made = original(self, velocity)
        if made.requires_grad:
            made.retain_grad()
            leaf["x0"] = made
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state.__class__, "clean", clean)
        loss, _ = algorithm.losses(policy, experience, items)
        loss.sum().backward()
    with torch.no_grad():
        with policy.snapshot("fake"):
            fake = noised.x - t * policy.velocity_of(experience.clean, noised)
        with policy.reference():
            teacher = noised.x - t * policy.velocity_of(experience.guided, noised)
    weight = (x0 - teacher).abs().flatten(1).mean(1).view_as(t)
    wanted = -2 * (teacher - fake) / weight / x0[0].numel()
    torch.testing.assert_close(leaf["x0"].grad, wanted, rtol=1e-2, atol=1e-5)


def test_a_generator_whose_score_is_the_teachers_stays(tmp_path: Path) -> None:
    """At the start, without guidance, `fake` is the teacher: no gradient but the rounding's."""
    run, experience = collected("dmd2", tmp_path, "algorithm.reference_guidance=1", moved=False)
    loss, values = run.algorithm.losses(run.policy, experience, experience.items)
    assert float(values["distillation/gap"].max()) < 1e-10
    loss.sum().backward()
    assert all(float(p.grad.abs().max()) < 1e-5 for p in run.learner.parameters.values() if p.grad is not None)


def test_roles_have_weights_and_moments_of_their_own_which_a_resumed_run_keeps(tmp_path: Path) -> None:
    own = [*FEW, "training.checkpoint_every=1", "training.iterations=3"]
    own += ["algorithm.fake.updates=2", "algorithm.fake.alone=1", "algorithm.levels.count=2"]
    whole = small_run("tiny_sd3/tdm", tmp_path, *own, "name=whole")
    whole.train()
    fake, policy = whole.policy.snapshots.weights["fake"], list(whole.learner.parameters.values())
    assert not any(map(torch.equal, fake[1:2], policy[1:2]))
    assert "policy" not in whole.policy.snapshots.weights
    half = small_run("tiny_sd3/tdm", tmp_path, *own, "name=half")
    half.config.training.iterations = 2
    half.train()
    resumed = small_run("tiny_sd3/tdm", tmp_path, *own, "name=half", resume=True)
    assert resumed.iteration == 2
    resumed.train()
    for kept, again in zip(fake, resumed.policy.snapshots.weights["fake"], strict=True):
        assert torch.equal(kept, again)
    assert all(map(torch.equal, policy, resumed.learner.parameters.values()))
    moments = [
        {key: value for key, value in run.learner.role_optimizers["fake"].state_dict()["state"][0].items()}
        for run in (whole, resumed)
    ]
    assert all(torch.equal(moments[0][key], moments[1][key]) for key in moments[0])
    # two updates of `fake` for one of the generator, which leaves out the first
    assert (moments[0]["step"], whole.learner.optimizer.state_dict()["state"][0]["step"]) == (6, 2)


def test_the_surrogate_is_asked_for_the_score_given_the_state_and_learns_dgpo(tmp_path: Path) -> None:
    least = ["algorithm.least_judged=0.8", "algorithm.least_rewarded=0.7"]
    run, experience = collected("tdm_r1", tmp_path, "training.group_size=4", "training.micro_batch_size=8", *least)
    algorithm, policy, items = run.algorithm, run.policy, experience.items
    noised, steps = experience.judged.noised(experience, items)
    trajectory = experience.rollout.trajectory
    stored = trajectory.latents[noised.samples, steps + 1]
    after, t = trajectory.sigmas[steps + 1].view_as(noised.s), noised.s
    a = (1 - t) / (1 - after)
    b = (t**2 - (after * a) ** 2).sqrt()
    noise = (noised.x - a * stored) / b
    # one noise for the members of a group
    shared = noise.unflatten(0, (len(items), -1))
    torch.testing.assert_close(shared, shared[:, :1].expand_as(shared), atol=1e-4, rtol=0)
    # METHODS of TDM-R1: - x_n / (1 - s_n) + noise / b (t + s_n^2 a / (1 - s_n))
    target = -stored / (1 - after) + noise / b * (t + after**2 * a / (1 - after))
    torch.testing.assert_close(noised.velocity, target, atol=1e-3, rtol=1e-3)
    # a literal DGPO, a group at a time, under weights of the surrogate that have moved
    with torch.no_grad():
        for copy in policy.snapshots.weights["surrogate"]:
            copy.add_(0.02 * torch.randn_like(copy))
    with policy.snapshots.trained("surrogate"), torch.no_grad():
        loss, _ = algorithm.role_losses("surrogate", policy, experience, items)
        velocity = policy.velocity_of(experience.judged.clean, noised)
        with policy.reference():
            teacher = policy.velocity_of(experience.judged.clean, noised)
        with policy.snapshot("slow"):
            slow = policy.velocity_of(experience.judged.clean, noised)
    for row, got in enumerate(loss.tolist()):
        members = range(4 * row, 4 * row + 4)
        errors = [[float((v[i] - target[i]).square().mean()) for i in members] for v in (velocity, teacher, slow)]
        advantage = [float(experience.advantage[noised.samples[i]]) for i in members]
        lean = sum(A * (e - r) for A, e, r in zip(advantage, *errors[:2], strict=True)) / 4
        weight = 1 / (1 + torch.tensor(-lean).exp())
        gaps = [float((velocity[i] - teacher[i]).square().mean()) for i in members]
        wanted = sum(weight * A * e for A, e in zip(advantage, errors[0], strict=True)) / 4 + 1e-3 * sum(gaps) / 4
        assert got == pytest.approx(float(wanted) * (int(steps[4 * row]) + 1) / 2, rel=1e-2, abs=1e-5)
    assert t.min() > 0.8
    # the generator is moved by the surrogate at other levels, by one noise for a group
    policy_loss, values = algorithm.losses(policy, experience, items)
    state = experience.states(items)
    start = state.clean(policy.velocity_of(experience.generator, state).detach())
    at = algorithm.diffused(experience.rewarded, items, state, start)
    drawn = experience.rewarded.noised(items).noise.unflatten(0, (len(items), -1))
    assert at.s.min() > 0.7 and torch.equal(drawn, drawn[:, :1].expand_as(drawn))
    assert not torch.isclose(at.sigma, experience.noised(items).sigma).any()
    with torch.no_grad():
        with policy.snapshot("surrogate"):
            there = policy.velocity_of(experience.guided_surrogate, at)
        with policy.reference():
            plain = policy.velocity_of(experience.rewarded.clean, at)
    gap = (at.s * (there - plain)).square().flatten(1).mean(1).view(len(items), -1).mean(1)
    assert policy_loss.shape == (len(items),)
    torch.testing.assert_close(values["distillation/reward_gap"], gap, rtol=1e-3, atol=1e-6)


def test_the_fake_learns_five_times_as_in_the_published_scripts() -> None:
    """dfake_gen_update_ratio of tianweiy/DMD2's scripts; TDM's script alternates."""
    assert [registry.resolve("algorithms", name).Settings().fake.updates for name in ("dmd2", "tdm")] == [5, 1]
