"""Rewards in distillation: RTDMD against its authors' lines, DIDR where all is Gaussian, GDMD written out."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from flowalign import registry
from flowalign.algorithms.matching import rtdmd
from flowalign.config import load, recipe
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import CleanSamples, Noised
from samplers import Trajectory, cps_published
from tests.flowalign.algorithms.matching.test_distillation import collected

THEIRS = load_file(Path(__file__).parent / "originals" / "few_steps.safetensors")
SIGMAS = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0])


def method(name: str, **settings: Any) -> Any:
    kind = registry.resolve("algorithms", name)
    return kind(kind.Settings(**settings))


class Recorded:
    """The networks that the numbers are of."""

    def __init__(self, velocity: Tensor) -> None:
        self.acting, self.asked, self.slopes = velocity, "slopes", THEIRS["slopes"].clone().requires_grad_()

    @contextmanager
    def snapshot(self, name: str) -> Iterator[None]:
        self.asked = name
        yield
        self.asked = "slopes"

    def reference(self) -> Any:
        return self.snapshot("teacher")

    def velocity(self, rollout: object, samples: Tensor, steps: Tensor) -> Tensor:
        return self.acting[samples, torch.tensor([0, 0, 1, 2])[steps]]

    def velocity_of(self, clean: object, noised: Noised, x: Tensor | None = None) -> Tensor:
        if self.asked != "slopes":
            return THEIRS[self.asked]
        return self.slopes[0] * (noised.x if x is None else x) + self.slopes[1] * noised.s


class Steps(rtdmd.RTDMDExperience):
    """The samples of the record, whose reward is a product with what is liked."""

    def __init__(self) -> None:
        count = torch.arange(5)
        latents = torch.zeros(5, 5, 2, 3, 3)
        latents[:, [0, 2, 3]] = THEIRS["x"]
        latents[:, [1, 3]] = THEIRS["next"][:, :2]
        velocity = torch.zeros(5, 4, 2, 3, 3)
        velocity[:, [0, 2, 3]] = THEIRS["velocity"]
        eta = torch.tensor([0.9, 0.9, 0.9, 0.0]).expand(5, -1)
        self.trajectory = Trajectory(
            latents=latents, velocity=velocity, log_prob=torch.zeros(5, 4), eta=eta, sigmas=SIGMAS
        )
        self.rollout: Any = SimpleNamespace(trajectory=self.trajectory, kernel=cps_published)
        self.acting, self.noise_seeds, self.level_index = (0, 2), list(range(5)), count[:, None]
        self.advantage, self.lower_index = THEIRS["advantage"].clamp(-5, 5), count[:, None]
        self.guided = self.clean = self.generator = None
        sigmas, x0 = THEIRS["lower"], torch.zeros(5, 2, 3, 3)
        sides: dict[str, Any] = {"conditions": None, "guidance": (1.0,), "error_weights": torch.ones(5)}
        self.lower = CleanSamples(x0=x0, sigmas=sigmas, **sides)

    def members(self, items: Tensor) -> Tensor:
        return items[:, 0]

    def places(self, items: Tensor) -> Tensor:
        return items[:, 1]

    def states(self, items: Tensor) -> Noised:
        # the step before the last one is learned from in the record too: its state is the last one's there
        return self.made(THEIRS["x"][:, 2], THEIRS["velocity"][:, 2], SIGMAS[3].expand(5))

    def noised(self, items: Tensor) -> Noised:
        at = self.states(items)
        return replace(at, noise=THEIRS["noise"], sigma=THEIRS["t"])

    @staticmethod
    def made(x: Tensor, velocity: Tensor, sigma: Tensor) -> Noised:
        s, rows = sigma.view(-1, 1, 1, 1), torch.arange(5)
        return Noised(x - s * velocity, x + (1 - s) * velocity, sigma, rows, rows, torch.ones(5))

    def value(self, policy: object, latents: Tensor, samples: Tensor) -> Tensor:
        return (THEIRS["liking"][samples] * latents).flatten(1).sum(1)


def items() -> Tensor:
    return torch.stack([torch.arange(5), torch.zeros(5, dtype=torch.long)], 1)


def test_rtdmds_gradients_are_its_authors(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, experience = method("rtdmd"), Steps()
    velocity = THEIRS["velocity"].clone().requires_grad_()
    policy, trajectory = Recorded(velocity), experience.trajectory
    for place, step in enumerate(experience.acting):
        at = torch.arange(5), torch.full((5,), step)
        # step 2 leads to the state of the last step, which the record has another of
        trajectory.latents[:, step + 1] = THEIRS["next"][:, place]
        drawn = trajectory.score(cps_published, THEIRS["velocity"][:, place], *at).log_prob
        trajectory.log_prob[:, step] = drawn + THEIRS["moved"][:, place]
    loss, values = algorithm.losses(policy, experience, items())
    (gradient,) = torch.autograd.grad(loss.mean(), velocity)
    assert gradient.abs().amax((0, 2, 3, 4)).min() > 1e-6
    # what is clipped has no gradient: some of the recorded moves are beyond the range, and some within
    still = gradient[:, :2].flatten(2).abs().amax(2) == 0
    assert 0 < still.sum() < 10
    torch.testing.assert_close(gradient, THEIRS["gradient"], rtol=1e-4, atol=1e-9)

    noises = [THEIRS["first"], THEIRS["second"]]
    monkeypatch.setattr(rtdmd, "normal", lambda *_: noises.pop(0))
    loss, values = algorithm.role_losses("fake", policy, experience, items())
    assert values["fake/inconsistency"].mean().item() == pytest.approx(THEIRS["agreement"].item(), rel=1e-5)
    assert loss.mean().item() == pytest.approx(THEIRS["fake_loss"].item(), rel=1e-5)
    (gradient,) = torch.autograd.grad(loss.mean(), policy.slopes)
    torch.testing.assert_close(gradient, THEIRS["fake_gradient"], rtol=1e-4, atol=1e-7)


def test_rtdmd_learns_drawn_steps_from_a_ratio_of_one(tmp_path: Path) -> None:
    run, experience = collected("rtdmd", tmp_path, moved=False)
    assert len(experience.acting) == 2 and set(experience.acting) < {0, 1, 2}
    assert (experience.steps == 3).all() and not experience.rollout.mask[:, 3].any()
    assert (experience.lower.sigmas[experience.lower_index] < experience.clean.sigmas[experience.level_index]).all()
    again = run.algorithm.redrawn(experience, 0)
    # the level below goes with its level
    pairs = [
        set(zip(one.level_index.flatten().tolist(), one.lower_index.flatten().tolist(), strict=True))
        for one in (experience, again)
    ]
    assert pairs[0] == pairs[1] and not again.level_index.equal(experience.level_index)
    _, values = run.algorithm.losses(run.policy, experience, experience.items)
    # at a ratio of one the loss is minus the advantage
    torch.testing.assert_close(
        values["rtdmd/policy_loss"], -experience.advantage[experience.items[:, 0]], rtol=1e-3, atol=1e-4
    )
    for override, message in (
        ("rollout.kernel=ode", "stochastic steps and a last one without noise"),
        ("algorithm.levels={name: schedule, count: 1}", "fake steps down from levels"),
        ("rewards=[{name: shapes}]", "'shapes' has no gradient"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(recipe("tiny_sd3/rtdmd"), [override]).check(processes=1)
    load(recipe("tiny_sd3/rtdmd"), ["rewards=[{name: shapes}]", "algorithm.reward_weight=0"]).check(processes=1)


@pytest.mark.parametrize("s", [0.2, 0.5, 0.9])
def test_the_diffused_reward_is_the_tilted_teachers_score(s: float) -> None:
    """Data N(0, V), r = a x0: tilted by exp(r / beta) they are N(a V / beta, V), whose posterior mean is known."""
    variance, slope, beta = 0.6, 1.5, 2.0
    of_x = (1 - s) ** 2 * variance + s**2
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)[None]
    kept = (1 - s) * variance / of_x

    class Teacher(Recorded):
        model = _bare = None

        def velocity_of(self, clean: object, noised: Noised, x: Tensor | None = None) -> Tensor:
            return (x - kept * x) / s  # type: ignore[operator]

    row = torch.tensor([0])
    noised = Noised(x * 0, x / s, torch.tensor([s], dtype=torch.float64), row, row, torch.ones(1))
    didr = registry.resolve("algorithms", "didr")
    experience = didr.experience_type.__new__(didr.experience_type)
    experience.descent = CleanSamples(
        x0=x * 0, conditions=None, sigmas=noised.sigma, guidance=(1.0,), error_weights=torch.ones(1)
    )
    experience.value = lambda policy, latents, samples: slope * latents.sum(1)
    # float32 would do for networks, not for this comparison
    value, shift = method("didr", beta=beta).tilt(Teacher(x), experience, noised, row[:, None])
    mean = slope * variance / beta
    tilted = mean + kept * (x - (1 - s) * mean)
    torch.testing.assert_close(shift, tilted - kept * x, rtol=1e-5, atol=1e-6)
    assert value.item() == pytest.approx(float(slope * kept * x.sum()), abs=1e-5)


def test_didrs_teacher_walks_down_and_its_gradient_flows_back(tmp_path: Path) -> None:
    """The proxy in two steps of the real network against differences of the reward."""
    run, experience = collected("didr", tmp_path, "algorithm.denoising_steps=2", "algorithm.beta=1")
    algorithm, policy, rows = run.algorithm, run.policy, experience.items[:2]
    noised = experience.noised(rows)
    index = experience.descent_index[experience.members(rows), experience.places(rows)]
    sigmas = experience.descent.sigmas[index]
    torch.testing.assert_close(sigmas[:, 0], noised.sigma)
    assert (sigmas[:, 1] < sigmas[:, 0]).all()
    _, shift = algorithm.tilt(policy, experience, noised, index)
    gradient = shift * (1 - noised.s) / noised.s**2
    direction = gradient / gradient.flatten(1).norm(dim=1).view_as(noised.s)
    ends = []
    for side in (1, -1):
        x = noised.x + side * 0.05 * direction
        with torch.no_grad(), policy.reference():
            for number in range(2):
                after = sigmas[:, 1].view_as(noised.s) if number == 0 else 0
                at = experience.descent.noised_by(noised.samples, index[:, number], noised.noise)
                x = x + (after - at.s) * policy.velocity_of(experience.descent, at, x)
            ends.append(experience.value(policy, x, noised.samples))
    torch.testing.assert_close((ends[0] - ends[1]) / 0.1, gradient.flatten(1).norm(dim=1), rtol=0.1, atol=0)
    assert all(parameter.grad is None for parameter in run.learner.parameters.values())
    # the generator's x0 is drawn along the teacher's and the shift, away from the fake's
    loss, values = algorithm.losses(policy, experience, rows)
    assert values["didr/tilt"].min() > 0
    state = experience.states(rows)
    with torch.no_grad():
        x0 = state.clean(policy.velocity_of(experience.generator, state).float())
        noised = algorithm.diffused(experience, rows, state, x0)
        fake, teacher = algorithm.asked(policy, experience, noised)
    along = teacher + algorithm.tilt(policy, experience, noised, index)[1] - fake
    assert (along - (teacher - fake)).flatten(1).norm(dim=1).min() > 0 and not torch.equal(teacher, fake)
    expected = along.square().flatten(1).mean(1) / (x0 - teacher).abs().flatten(1).mean(1)
    torch.testing.assert_close(loss.detach(), expected)
    with pytest.raises(ConfigError, match="the teacher walks down from levels between 0 and 1"):
        load(recipe("tiny_sd3/didr"), ["algorithm.levels={name: schedule, count: 1}"]).check(processes=1)


def test_gdmd_weighs_the_gradient_of_distribution_matching_by_rewards_of_its_targets(tmp_path: Path) -> None:
    run, experience = collected("gdmd", tmp_path, "algorithm.levels={count: 3}", moved=False)
    algorithm, policy, rows = run.algorithm, run.policy, experience.items
    # one step for all targets; each is where distribution matching would go, decoded and scored
    assert len(experience.steps.unique()) == 1
    state = experience.states(rows)
    noised = experience.noised(rows)
    x = (1 - noised.s) * state.x0 + noised.s * noised.noise
    with torch.no_grad():
        with policy.snapshot("fake"):
            fake = x - noised.s * policy.velocity_of(experience.clean, noised, x)
        with policy.reference():
            teacher = x - noised.s * policy.velocity_of(experience.guided, noised, x)
    at = experience.members(rows), experience.places(rows)
    target = experience.targets[at]
    torch.testing.assert_close(target, state.x0 + teacher - fake, rtol=1e-3, atol=1e-4)
    reward = torch.stack(
        [run.scorer.score(policy.decode_latents(experience.targets[:, k]), experience.batch).value for k in range(3)], 1
    )
    spread = (reward - reward.mean(1, keepdim=True)) / (reward.std(correction=0) + 1e-4)
    assert spread.abs().max() > 0.5
    torch.testing.assert_close(experience.target_advantages, spread.float(), rtol=1e-4, atol=1e-5)
    # at the weights that sampled: 2 r = 1 + A times the gradient, within [0, 2]
    seen = {}
    original = Noised.clean

    def clean(self: Noised, velocity: Tensor) -> Tensor:
        made = original(self, velocity)
        if made.requires_grad:
            made.retain_grad()
            seen["x0"] = made
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Noised, "clean", clean)
        loss, _ = algorithm.losses(policy, experience, rows)
        loss.sum().backward()
    weight = (1 + experience.target_advantages[at]).clamp(0, 2)
    size = (state.x0 - teacher).abs().flatten(1).mean(1)
    wanted = (weight / size).view_as(noised.s) * -2 * (target - state.x0) / target[0].numel()
    torch.testing.assert_close(seen["x0"].grad, wanted, rtol=1e-2, atol=1e-5)
    with pytest.raises(ConfigError, match="targets of a sample are compared"):
        load(recipe("tiny_sd3/gdmd"), ["algorithm.levels={count: 1}"]).check(processes=1)


def test_gdmds_mixtures_are_drawn_to_a_target_by_how_good_it_is() -> None:
    """Away from the weights that sampled, a literal version."""
    gdmd = registry.resolve("algorithms", "gdmd")
    settings = gdmd.Settings(beta=0.5, advantage_max=2.0, distillation_weight=0.3)
    module = __import__(gdmd.__module__, fromlist=["guided"])
    x0, old, target = torch.randn(3, 4, 2, 2, generator=torch.Generator().manual_seed(1)).unbind(0)
    advantage = torch.tensor([-3.0, -1.0, 0.5, 4.0])
    loss, good = module.guided(x0, old, target, advantage, settings)
    for row, (r, A) in enumerate(zip(good.tolist(), advantage.tolist(), strict=True)):
        assert r == pytest.approx(min(max(0.5 + A / 4, 0), 1))
        plus, minus = 0.5 * old[row] + 0.5 * x0[row], 1.5 * old[row] - 0.5 * x0[row]
        errors = [float((target[row] - each).square().mean()) for each in (plus, minus, x0[row])]
        assert loss[row].item() == pytest.approx(
            (r * errors[0] + (1 - r) * errors[1]) / 0.5 + 0.3 * errors[2], rel=1e-5
        )
