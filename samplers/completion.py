"""Completions: half-denoised samples finished by the ODE, so that they can be scored.

States of different steps travel in one batch, each at its own noise level; a velocity that the rollout already
computed is not computed again; and states that deterministic steps lead to the same end share one completion.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from samplers.kernels import Kernel, transition
from samplers.noise import generators, normal
from samplers.rows import distinct_rows
from samplers.solvers import DPMSolver
from samplers.trajectory import Recorder, Trajectory

VelocityAt = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x [N, ...], samples [N], steps [N]) -> velocity [N, ...] of samples of a rollout at steps of its schedule"""


def path(first: int, last: int, count: int | None = None, stride: int = 1) -> list[int]:
    """Schedule indices from `first` to `last`: in `count` near-equal leaps, or one step and then every `stride`-th.

    What a last stride cannot reach is part of the leap before it, as in G2RPO's code: 1, 2, 4, 6, 9 for stride 2.
    """
    if count is None:
        return [first, *range(first + 1, last + 1, stride)[:-1], last] if first < last else [last]
    count = min(count, last - first)
    return [first + round(i * (last - first) / count) for i in range(count + 1)]


@torch.no_grad()
def complete(
    velocity: VelocityAt,
    x: Tensor,
    samples: Tensor,
    paths: Sequence[Sequence[int]],
    sigmas: Tensor,
    start_velocity: Tensor | None = None,
    batch_size: int = 64,
    order: Literal[1, 2] = 1,
    record: Trajectory | None = None,
) -> Tensor:
    """Take N states down the ODE, all in step.

    Args:
        x: [N, ...] states.
        samples: [N] the sample of the rollout each belongs to.
        paths: N lists of schedule indices, from the state's own to the end.
        sigmas: [T + 1].
        start_velocity: [N, ...] velocities at the states, where they are known: the first leap is then free.
        batch_size: rows a network call.
        order: order of the solver: 1 is Euler's rule, 2 DPM-Solver++.
        record: N trajectories, which get the states on the way and their velocities.

    Returns:
        [N, ...] float32 finished samples.
    """
    x = x.float().clone()
    # diffusers' solver walks one path at a time; the network still sees the states of all paths together
    by_path = _by_path(paths).items() if order == 2 else ()
    together = [(members, _indices(members, x.device), DPMSolver(sigmas[list(p)])) for p, members in by_path]
    for leap in range(max(len(p) for p in paths) - 1):
        moving = [n for n, p in enumerate(paths) if len(p) > leap + 1]
        rows = _indices(moving, x.device)
        here = _indices([p[leap] for p in paths if len(p) > leap + 1], x.device)
        there = _indices([p[leap + 1] for p in paths if len(p) > leap + 1], x.device)
        if leap == 0 and start_velocity is not None:
            v = start_velocity[rows]
        else:
            chunks = zip(rows.split(batch_size), here.split(batch_size), strict=True)
            v = torch.cat([velocity(x[n], samples[n], k).float() for n, k in chunks])
        if order == 1:
            dt = (sigmas[there] - sigmas[here]).view(-1, *[1] * (x.dim() - 1))
            x[rows] += v * dt
        else:
            slot_of = {row: n for n, row in enumerate(moving)}
            for members, indices, solver in together:
                if members[0] in slot_of:
                    x[indices] = solver.step(x[indices], v[_indices([slot_of[m] for m in members], x.device)])
        if record is not None:
            record.velocity[rows, here] = v
            record.latents[rows, there] = x[rows]
    return x


def _indices(numbers: Sequence[int], device: torch.device) -> Tensor:
    """[N] on the device, without the host waiting for it."""
    return torch.tensor(numbers).to(device, non_blocking=True)


def _by_path(paths: Sequence[Sequence[int]]) -> dict[tuple[int, ...], list[int]]:
    """The rows that take each path."""
    rows: dict[tuple[int, ...], list[int]] = {}
    for row, p in enumerate(paths):
        rows.setdefault(tuple(p), []).append(row)
    return rows


@dataclass(kw_only=True)
class Completions:
    """The distinct finished samples of a batch of trajectories."""

    latents: Tensor
    """[M, ...]: first the B samples themselves, then the completions"""
    samples: Tensor
    """[M] the trajectory each belongs to, or one of them"""
    steps: Tensor
    """[M] the step whose state each was finished from, T for the samples themselves"""
    index: Tensor
    """[B, T + 1] into the M: what state k ends in when it is finished by the ODE"""


def completions(
    velocity: VelocityAt,
    trajectory: Trajectory,
    count: int | None = None,
    batch_size: int = 64,
    order: Literal[1, 2] = 1,
) -> Completions:
    """Finish every state of every trajectory by the ODE.

    A state before a deterministic step ends where the next state ends, so only the states before stochastic steps
    are integrated; and of a state that several trajectories share, one.

    Args:
        count: ODE steps of a completion; None takes the whole rest of the schedule, 1 is the one-step x0 estimate.
        order: order of the solver, as in `complete`.
    """
    batch, steps = trajectory.mask.shape
    rows, columns = trajectory.mask.nonzero().unbind(1)
    # the first of the trajectories that share a state stands for it
    first, state = distinct_rows(trajectory.states(rows, columns))
    samples, firsts = rows[first], columns[first]
    finished = trajectory.final
    if len(first):
        completed = complete(
            velocity,
            trajectory.latents[samples, firsts],
            samples,
            [path(first, steps, count) for first in firsts.tolist()],
            trajectory.sigmas,
            start_velocity=trajectory.velocity[samples, firsts],
            batch_size=batch_size,
            order=order,
        )
        finished = torch.cat([finished, completed])
    number = torch.zeros_like(trajectory.mask, dtype=torch.long)
    number[rows, columns] = batch + state
    ends = [torch.arange(batch, device=number.device)]
    for k in reversed(range(steps)):
        ends.append(torch.where(trajectory.mask[:, k], number[:, k], ends[-1]))
    originals = torch.arange(batch, device=samples.device)
    return Completions(
        latents=finished,
        samples=torch.cat([originals, samples]),
        steps=torch.cat([torch.full_like(originals, steps), firsts]),
        index=torch.stack(ends[::-1], 1),
    )


@torch.no_grad()
def fork(
    velocity: VelocityAt,
    start: Tensor,
    sigmas: Tensor,
    kernel: Kernel,
    samples: Tensor,
    eta: Tensor,
    seeds: Sequence[int],
    batch_size: int = 64,
    order: Literal[1, 2] = 1,
) -> Trajectory:
    """N trajectories from G start noises; the network is asked once about a state that several of them share.

    They share their states up to the first stochastic step, the one it leaves from too.

    Args:
        start: [G, ...] start noise.
        sigmas: [T + 1], ending in 0.
        samples: [N] the start noise of each.
        eta: [T] noise levels on the CPU.
        seeds: N seeds of the step noise: the trajectories equal N rollouts of their own.
        order: order of the solver after the last stochastic step, as of `Recorder`.
    """
    first = int((eta > 0).nonzero()[0])
    members = torch.arange(len(samples), device=samples.device)
    roots = samples.new_full((len(start),), len(samples)).scatter_reduce(0, samples, members, "amin")
    recorder = Recorder(start[samples], sigmas, kernel, eta, seeds, order)
    for k in range(len(eta)):
        asked = recorder.x[roots] if k <= first else recorder.x
        rows = samples[roots] if k <= first else samples
        chunks = zip(asked.split(batch_size), rows.split(batch_size), strict=True)
        v = torch.cat([velocity(x, numbers, torch.full_like(numbers, k)).float() for x, numbers in chunks])
        recorder.step(v[samples] if k <= first else v)
    together = samples[:, None].expand(-1, first + 1)
    apart = members[:, None].expand(-1, len(eta) - first)
    return replace(recorder.trajectory(), nodes=torch.cat([together, apart], 1))


@torch.no_grad()
def perturb(
    trunk: Trajectory, kernel: Kernel, samples: Tensor, steps: Tensor, eta: Tensor, seeds: Sequence[int]
) -> Trajectory:
    """Branches off trunk trajectories: one stochastic step each, from the trunk's state and velocity.

    Args:
        samples, steps: [N] where each branch leaves the trunk.
        eta: [N] noise level of its step.
        seeds: N seeds of its noise.

    Returns:
        N trajectories whose states up to the branch are the trunk's; what follows the perturbed state is not
        filled in: `complete` it, with them as its `record`.
    """
    rows = torch.arange(len(samples), device=samples.device)
    nodes = trunk.numbered()
    together = torch.arange(nodes.shape[1], device=samples.device) <= steps[:, None]
    step = transition(
        kernel,
        trunk.latents[samples, steps],
        trunk.velocity[samples, steps],
        trunk.sigmas[steps],
        trunk.sigmas[steps + 1],
        eta,
        noise=normal(trunk.latents.shape[2:], generators(seeds), samples.device),
    )
    branches = Trajectory(
        latents=trunk.latents[samples],
        velocity=trunk.velocity[samples],
        log_prob=torch.zeros_like(trunk.log_prob[samples]),
        eta=torch.zeros_like(trunk.eta[samples]),
        sigmas=trunk.sigmas,
        nodes=torch.where(together, nodes[samples], nodes.max() + 1 + rows[:, None]),
    )
    branches.latents[rows, steps + 1] = step.next
    branches.log_prob[rows, steps] = step.log_prob
    branches.eta[rows, steps] = eta * step.stochastic
    return branches
