"""Tree rollouts: trajectories that share their prefixes (BranchGRPO, arXiv 2509.06040; SPO, 2406.04314)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from samplers.completion import VelocityAt, complete, path
from samplers.kernels import Kernel, transition
from samplers.noise import derive_seed, generators, normal
from samplers.plans import Tree
from samplers.trajectory import Trajectory


@torch.no_grad()
def grow(
    velocity: VelocityAt,
    trunk: Trajectory,
    kernel: Kernel,
    plan: Tree,
    eta: Tensor,
    seeds: Sequence[int],
    batch_size: int,
) -> tuple[Trajectory, Tensor]:
    """Grow one tree from the start noise of each trunk; every node is computed once.

    Args:
        velocity: velocity of the samples of the trunk's rollout.
        trunk: B trajectories, of which only the start noise and its velocity are used.
        eta: [T] noise levels.
        seeds: B seeds.
        batch_size: rows a network call.

    Returns:
        The leaves' trajectories, tree after tree (B * leaves), with their nodes numbered over all trees; and
        [B * leaves] the trunk each grew from.
    """
    batch, steps, device = len(trunk), len(eta), trunk.latents.device
    widths = plan.widths(steps)
    x, v = trunk.latents[:, 0], trunk.velocity[:, 0]
    # per depth, all nodes of all trees, tree after tree
    states, velocities, log_probs, etas = [x], [], [], []
    for k in range(steps):
        trees = torch.arange(batch, device=device).repeat_interleave(widths[k])
        if k > 0:
            chunks = zip(*(rows.split(batch_size) for rows in (x, trees, torch.full_like(trees, k))), strict=True)
            v = torch.cat([velocity(*chunk).float() for chunk in chunks])
        velocities.append(v)
        children = widths[k + 1] // widths[k]
        x, v, noise = x.repeat_interleave(children, 0), v.repeat_interleave(children, 0), None
        if eta[k] > 0:
            sources = [derive_seed(seed, k, node) for seed in seeds for node in range(widths[k + 1])]
            noise = normal(x.shape[1:], generators(sources), device) * (plan.noise_scale if children > 1 else 1.0)
        level, sigma, sigma_next = (value.expand(len(x)) for value in (eta[k].to(device), *trunk.sigmas[k : k + 2]))
        step = transition(kernel, x, v, sigma, sigma_next, level, noise=noise)
        x = step.next
        states.append(x)
        log_probs.append(step.log_prob)
        etas.append(eta[k].to(device) * step.stochastic)
    trees = torch.arange(batch, device=device).repeat_interleave(plan.leaves)
    nodes = plan.nodes(steps).to(device).repeat(batch, 1) + trees[:, None] * torch.tensor(widths, device=device)

    def paths(values: list[Tensor], first: int = 0) -> Tensor:
        """[B * leaves, ...] of each leaf its nodes' values, from this depth on."""
        return torch.stack([value[nodes[:, depth]] for depth, value in enumerate(values, first)], 1)

    leaves = Trajectory(
        latents=paths(states),
        velocity=paths(velocities),
        log_prob=paths(log_probs, 1),
        eta=paths(etas, 1),
        sigmas=trunk.sigmas,
        nodes=nodes,
    )
    return leaves, trees


@torch.no_grad()
def side_branches(
    velocity: VelocityAt,
    trunk: Trajectory,
    kernel: Kernel,
    seeds: Sequence[Sequence[int]],
    start: int,
    batch_size: int,
) -> Trajectory:
    """Beside every stochastic step of each trunk, other draws of the same step, which nothing is continued from.

    Their next states are independent and alike in distribution, the trunk's own among them: going on from the trunk's
    is going on from one of them at random.

    Args:
        velocity: velocity of the samples of the trunk's rollout.
        trunk: B trajectories.
        seeds: seeds of each trunk's side branches, S each.
        start: the first step that has side branches.
        batch_size: rows a network call.

    Returns:
        B * (1 + S) trajectories, a trunk and then its side branches. State k + 1 of a side branch is its own draw of
        step k, which left from state k of the trunk, not from its own; `log_prob` and `velocity` are of those states.
        The side branches of the last stochastic step are finished by the ODE.
    """
    batch, device = len(trunk), trunk.latents.device
    count, steps = 1 + len(seeds[0]), trunk.mask.shape[1]
    rows = torch.arange(batch, device=device).repeat_interleave(count)
    branches = trunk[rows]
    side = (torch.arange(batch * count, device=device) % count > 0).nonzero()[:, 0]
    starts = rows[side]
    sources = generators([seed for row in seeds for seed in row])
    branching = [k for k in trunk.mask.any(0).nonzero()[:, 0].tolist() if k >= start]
    for k in branching:
        at = torch.full_like(starts, k)
        step = transition(
            kernel,
            trunk.latents[starts, k],
            trunk.velocity[starts, k],
            trunk.sigmas[at],
            trunk.sigmas[at + 1],
            trunk.eta[starts, k],
            noise=normal(trunk.latents.shape[2:], sources, device),
        )
        branches.latents[side, k + 1], branches.log_prob[side, k] = step.next, step.log_prob
        if k + 1 < steps:
            chunks = zip(step.next.split(batch_size), starts.split(batch_size), at.split(batch_size), strict=True)
            branches.velocity[side, k + 1] = torch.cat([velocity(x, n, i + 1).float() for x, n, i in chunks])
    last = branching[-1] + 1
    if last < steps:
        ways = [path(last, steps)] * len(side)
        x, v = branches.latents[side, last], branches.velocity[side, last]
        branches.latents[side, -1] = complete(velocity, x, starts, ways, trunk.sigmas, v, batch_size)
    # up to the first branching step a trunk and its side branches are at the same states
    together = torch.arange(steps + 1, device=device) <= branching[0]
    numbers = torch.arange(batch * count, device=device)
    branches.nodes = torch.where(together, (rows * count)[:, None], numbers[:, None])
    return branches
