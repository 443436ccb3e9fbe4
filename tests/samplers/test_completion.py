"""Completions, branches and trees against literal loops, on a velocity that depends on sample, step and state."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from samplers import KERNELS, All, Trajectory, Tree, Window, rollout
from samplers.completion import complete, completions, fork, path, perturb
from samplers.tree import grow

SIGMAS = torch.tensor([1.0, 0.85, 0.6, 0.45, 0.2, 0.0])
STEPS = len(SIGMAS) - 1
SEEDS = [3, 4, 5]


def at(x: Tensor, samples: Tensor, steps: Tensor) -> Tensor:
    """A nonlinear velocity that differs between samples and steps."""
    shift = (samples + 2 * steps).view(-1, 1, 1, 1).float()
    return torch.tanh(1.5 * x + 0.1 * shift)


def start() -> Tensor:
    return torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(0))


def sampled(plan: object):
    """Three trajectories of the velocity above under a plan."""
    steps = iter(range(STEPS))

    def velocity(x: Tensor, sigma: Tensor) -> Tensor:
        k = next(steps)
        return at(x, torch.arange(3), torch.full((3,), k))

    eta = plan.etas(STEPS, 0.7, 0, 0)  # type: ignore[attr-defined]
    return rollout(velocity, start(), SIGMAS, KERNELS["flow_sde"], eta, SEEDS)


def literal(trajectory, sample: int, state: int) -> Tensor:
    """One state finished alone, one Euler step after the other."""
    x = trajectory.latents[sample, state][None]
    for j in range(state, STEPS):
        x = x + at(x, torch.tensor([sample]), torch.tensor([j])) * (SIGMAS[j + 1] - SIGMAS[j])
    return x[0]


def test_every_state_is_finished_as_the_literal_loop_finishes_it():
    for plan in (All(), Window(size=2, start=1)):
        trajectory = sampled(plan)
        made = completions(at, trajectory)
        for sample in range(3):
            for state in range(STEPS + 1):
                ours = made.latents[made.index[sample, state]]
                torch.testing.assert_close(ours, literal(trajectory, sample, state), atol=1e-5, rtol=0)
                assert made.samples[made.index[sample, state]] == sample


def test_states_before_deterministic_steps_share_a_completion():
    trajectory = sampled(Window(size=2, start=1))
    made = completions(at, trajectory)
    assert len(made.latents) == 3 + 3 * 2
    assert (made.index[:, 0] == made.index[:, 1]).all() and (made.index[:, 3] == torch.arange(3)).all()


def test_the_known_velocity_is_not_computed_again():
    calls = []

    def counting(x: Tensor, samples: Tensor, steps: Tensor) -> Tensor:
        calls.extend(steps.tolist())
        return at(x, samples, steps)

    completions(counting, sampled(All()), batch_size=4)
    # a completion from stochastic step k needs steps k + 1 .. T - 1
    assert len(calls) == 3 * sum(STEPS - 1 - k for k in range(STEPS - 1))
    calls.clear()
    completions(counting, sampled(All()), count=1)
    assert calls == []


def test_one_step_completion_is_the_x0_estimate():
    trajectory = sampled(All())
    made = completions(at, trajectory, count=1)
    for state in range(STEPS - 1):
        x0 = trajectory.latents[:, state] - SIGMAS[state] * trajectory.velocity[:, state]
        torch.testing.assert_close(made.latents[made.index[:, state]], x0, atol=1e-5, rtol=0)


def test_paths():
    assert path(1, 5) == [1, 2, 3, 4, 5]
    assert path(1, 5, count=2) == [1, 3, 5]
    assert path(3, 5, count=9) == [3, 4, 5]
    assert path(5, 5) == [5]


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("first", [1, 2, 7, 15])
def test_a_strided_path_is_g2rpos(first: int, stride: int) -> None:
    """Its code runs the network at all but the last of schedule[:first + 1] + schedule[first + 1 :: stride]."""
    schedule = list(range(17))
    walked = (schedule[: first + 1] + schedule[first + 1 :: stride])[first:-1]
    assert path(first, 16, stride=stride) == [*walked, 16]


def test_branches_leave_the_trunk_at_their_step_only():
    trunk = sampled(Window(size=1, start=0))
    samples, steps = torch.tensor([0, 0, 2]), torch.tensor([1, 1, 3])
    made = perturb(trunk, KERNELS["flow_sde"], samples, steps, torch.full((3,), 0.7), [1, 2, 3])
    assert made.mask.nonzero().tolist() == [[0, 1], [1, 1], [2, 3]]
    for row, (sample, step) in enumerate(zip(samples, steps, strict=True)):
        assert torch.equal(made.latents[row, : step + 1], trunk.latents[sample, : step + 1])
        assert not torch.equal(made.latents[row, step + 1], trunk.latents[sample, step + 1])
    assert not torch.equal(made.latents[0, 2], made.latents[1, 2])
    scored = made.score(KERNELS["flow_sde"], trunk.velocity[samples, steps], torch.arange(3), steps)
    assert torch.equal(scored.log_prob, made.log_prob[torch.arange(3), steps])


def test_a_completed_branch_has_its_states_and_velocities_and_knows_what_it_shares():
    trunk = sampled(Window(size=1, start=0))
    samples, steps = torch.tensor([0, 0, 2, 0]), torch.tensor([1, 1, 3, 2])
    made = perturb(trunk, KERNELS["flow_sde"], samples, steps, torch.full((4,), 0.7), [1, 2, 3, 4])
    ways = [path(step + 1, STEPS) for step in steps.tolist()]
    ends = complete(at, made.latents[torch.arange(4), steps + 1], samples, ways, SIGMAS, batch_size=3, record=made)
    for row in range(4):
        for k in range(STEPS):
            x = made.latents[row, k]
            v = at(x[None], samples[row], torch.tensor([k]))[0]
            torch.testing.assert_close(made.velocity[row, k], v)
            if k > steps[row]:
                torch.testing.assert_close(made.latents[row, k + 1], x + v * (SIGMAS[k + 1] - SIGMAS[k]))
    assert torch.equal(ends, made.final)
    numbers = made.numbered()
    for depth in range(STEPS + 1):
        same = (made.latents[:, None, depth] == made.latents[None, :, depth]).flatten(2).all(2)
        assert torch.equal(numbers[:, None, depth] == numbers[None, :, depth], same)


def test_tree_leaves_are_walks_of_the_velocity_and_share_prefixes():
    plan = Tree(splits=[0, 2])
    trunk = sampled(Window(size=1, start=0))
    eta = plan.etas(STEPS, 0.7, 0, 0)
    leaves, trees = grow(at, trunk, KERNELS["flow_sde"], plan, eta, [7, 8, 9], 5)
    nodes = leaves.numbered()
    assert trees.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    for depth in range(STEPS + 1):
        for a in range(12):
            for b in range(12):
                same = torch.equal(leaves.latents[a, depth], leaves.latents[b, depth])
                assert same == bool(nodes[a, depth] == nodes[b, depth])
    rows = torch.arange(12)
    for step in range(STEPS):
        v = at(leaves.latents[:, step], trees, torch.full((12,), step))
        torch.testing.assert_close(leaves.velocity[:, step], v)
        scored = leaves.score(KERNELS["flow_sde"], v, rows, torch.full((12,), step))
        torch.testing.assert_close(scored.log_prob, leaves.log_prob[:, step])


def test_noise_at_a_split_can_be_larger_than_its_density_knows():
    trunk, eta = sampled(Window(size=1, start=0)), Tree([1]).etas(STEPS, 0.7, 0, 0)
    plain, loud = (
        grow(at, trunk, KERNELS["flow_sde"], Tree([1], noise_scale=scale), eta, [7, 8, 9], 5)[0] for scale in (1.0, 4.0)
    )
    assert torch.equal(plain.latents[:, 1], loud.latents[:, 1])
    made = plain.score(KERNELS["flow_sde"], plain.velocity[:, 1], torch.arange(6), torch.ones(6, dtype=torch.long))
    torch.testing.assert_close(loud.latents[:, 2] - made.mean, 4 * (plain.latents[:, 2] - made.mean))
    # each element's squared distance counts 16 times
    noise = ((plain.latents[:, 2] - made.mean) / made.std).flatten(1)
    torch.testing.assert_close(loud.log_prob[:, 1], plain.log_prob[:, 1] - 7.5 * noise.square().mean(1))


@pytest.mark.parametrize("first, order", [(0, 1), (2, 1), (1, 2)])
def test_a_fork_is_rollouts_of_their_own_and_asks_once_about_what_they_share(first, order):
    samples, eta = torch.tensor([1, 0, 1, 1, 0]), Window(size=2, start=first).etas(STEPS, 0.7, 0, 0)
    asked, steps = [], iter(range(STEPS))

    def counting(x: Tensor, rows: Tensor, steps: Tensor) -> Tensor:
        asked.append((int(steps[0]), len(x)))
        return at(x, rows, steps)

    forked = fork(counting, start()[:2], SIGMAS, KERNELS["flow_sde"], samples, eta, range(5), 3, order)
    assert asked == [(k, n) for k in range(STEPS) for n in ([2] if k <= first else [3, 2])]
    alone = rollout(
        lambda x, sigma: at(x, samples, torch.full((5,), next(steps))),
        start()[samples], SIGMAS, KERNELS["flow_sde"], eta, range(5), order,
    )  # fmt: skip
    for field in ("latents", "velocity", "log_prob", "eta"):
        torch.testing.assert_close(getattr(forked, field), getattr(alone, field), msg=field)
    shared = forked.latents[:, None].eq(forked.latents[None]).flatten(3).all(3)
    assert torch.equal(forked.numbered()[:, None].eq(forked.numbered()[None]), shared)


def test_states_that_trajectories_share_are_completed_once():
    samples, eta = torch.tensor([0, 0, 0, 1, 1, 1]), Window(size=2, start=1).etas(STEPS, 0.7, 0, 0)
    forked = fork(at, start()[:2], SIGMAS, KERNELS["flow_sde"], samples, eta, range(6))
    evaluated = []

    def counting(x: Tensor, rows: Tensor, steps: Tensor) -> Tensor:
        evaluated.append(len(x))
        return at(x, samples[rows], steps)

    made = completions(counting, forked)
    # two states before the first stochastic step, six before the second; the first velocity is known
    assert len(made.latents) == 6 + 2 + 6
    assert sum(evaluated) == 2 * (STEPS - 2) + 6 * (STEPS - 3)
    alone = completions(counting, replace(forked, nodes=None))
    torch.testing.assert_close(made.latents[made.index], alone.latents[alone.index])
    # joined rollouts keep their states apart
    twice = completions(lambda x, rows, steps: at(x, samples[rows % 6], steps), Trajectory.cat([forked, forked]))
    torch.testing.assert_close(twice.latents[twice.index[6:]], made.latents[made.index])
    assert len(twice.latents) == 2 * len(made.latents)


def test_complete_takes_states_of_different_steps_in_one_call():
    sizes = []

    def recording(x: Tensor, samples: Tensor, steps: Tensor) -> Tensor:
        sizes.append(len(x))
        return at(x, samples, steps)

    x = start()
    made = complete(recording, x, torch.arange(3), [path(k, STEPS) for k in (0, 2, 4)], SIGMAS)
    assert sizes == [3, 2, 2, 1, 1]
    assert made.shape == x.shape
