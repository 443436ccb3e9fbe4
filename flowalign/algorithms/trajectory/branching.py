"""Branching rollouts that several algorithms share: a deterministic trunk a prompt, left at every candidate step."""

import torch

from flowalign.config import Config
from flowalign.data.batches import Batch
from flowalign.policies.diffusion import Rollout
from flowalign.rollouts.pictures import DiffusionSampler
from samplers import derive_seed
from samplers.plans import Single

SINGLE = (Single, "{name: single, start: 0}")
"""Plan of branches that leave by one stochastic step; its range says where."""


def places(config: Config) -> range:
    """The steps at which a prompt's trunk is left, each by a group."""
    plan = config.build_plan()
    assert isinstance(plan, Single)
    return plan.places(config.rollout.steps)


def branch_everywhere(sampler: DiffusionSampler, batch: Batch) -> tuple[Rollout, Batch]:
    """One trunk a prompt; at every step of the plan's range the prompt's group leaves it by one stochastic step.

    Returns:
        The branches of group after group, and their batch: a group is the members of one prompt at one step.
    """
    assert isinstance(sampler.plan, Single)
    firsts = [batch.group.index(g) for g in dict.fromkeys(batch.group)]
    members = len(batch) // len(firsts)
    left = list(sampler.plan.places(sampler.config.rollout.steps))
    trunk = sampler.trunk(batch[firsts], left[-1] + 1)
    rows = [(t, k, m) for t in range(len(firsts)) for k in left for m in range(members)]
    samples = torch.tensor([t for t, _, _ in rows], device=sampler.device)
    steps = torch.tensor([k for _, k, _ in rows], device=sampler.device)
    branched = batch[[firsts[t] + m for t, _, m in rows]]
    branched.group = [batch.group[firsts[t]] * len(left) + left.index(k) for t, k, _ in rows]
    branched.noise_seeds = [derive_seed(batch.noise_seeds[firsts[t] + m], k) for t, k, m in rows]
    return sampler.branches(trunk, samples, steps, branched.noise_seeds), branched
