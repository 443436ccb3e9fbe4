"""BranchGRPO: trees of trajectories with shared prefixes (arXiv 2509.06040).

Rollout: from one start noise a prompt, samples split at the plan's steps, each child with its own noise; a shared
prefix is computed once. Credit: a leaf is worth its reward, an inner node the mean of the leaves under it; at each
depth the nodes of a tree are normalised against each other, and the advantage of a node belongs to the step that
led to it. Loss: PPO's clip on every edge of the tree, once, but for those that `pruning` leaves out.

`group_size` must be the number of leaves. The released code multiplies the noise at a split by 4 without telling the
log-probability: the plan's `noise_scale`, 1 by default. Departure: width is pruned tree by tree and by whole leaves;
the released code ranks single steps, of one advantage along a leaf, over all trees of a process.
"""

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms.policy_gradient import ActionExperience
from flowalign.algorithms.trajectory import base as trajectory
from flowalign.algorithms.trajectory.base import TrajectoryAlgorithm
from flowalign.config import Config, Named
from flowalign.core.credit import back_up, best_and_worst, first_of
from flowalign.core.record import Record
from flowalign.data.batches import Batch
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import Rollout
from flowalign.rollouts.pictures import DiffusionSampler, SampledPictures
from flowalign.rollouts.processes import Processes
from flowalign.settings import Section
from samplers.plans import Tree


class Pruning(Section):
    """Edges that are sampled and scored, and not learned from."""

    depths: list[int] = []
    """Depths at which all edges are cut; the first step ends at depth 1 (published: 15 to 18 of 20)."""
    every: int | None = Field(None, ge=1)
    """Iterations after which the depths move up by one; null: they stay (published: 30)."""
    stop: int = Field(1, ge=1)
    """Depth at which the first of them stops moving up (published: 9)."""
    width: Literal["parent", "extremes"] | None = None
    """Nodes kept after the last split: the better child of each node there, or a tree's best and worst leaves."""
    keep: float = Field(0.5, gt=0, le=1)
    """Share of a tree's leaves that are 'extremes'."""

    def pruned(self, iteration: int) -> list[int]:
        """The depths of an iteration."""
        moved = 0 if self.every is None or not self.depths else iteration // self.every
        return [depth - min(moved, max(0, min(self.depths) - self.stop)) for depth in self.depths]


class BranchGRPOSettings(trajectory.PolicySettings):
    advantage: Named = Named(name="grpo", clip=5.0, unbiased=True, eps=1e-8)
    pruning: Pruning = Pruning()
    memory_limit_gb: float | None = Field(None, gt=0)
    """Gigabytes that the stored trajectories of all prompts of an iteration may take; larger trees are refused."""


class BranchGRPO(TrajectoryAlgorithm):
    """BranchGRPO: tree rollouts, leaf rewards backed up to the branches (arXiv 2509.06040)."""

    name = "branch_grpo"
    combines = TrajectoryAlgorithm.combines - {"served"}
    Settings = BranchGRPOSettings
    settings: BranchGRPOSettings
    fields = frozenset()
    dense = True
    plan = (Tree, "{name: tree, splits: [0, 2]}")

    def check(self, config: Config) -> None:
        super().check(config)
        plan = config.build_plan()
        if plan.leaves != config.training.group_size:
            raise ConfigError(
                f"training.group_size: a tree with splits {plan.splits} has {plan.leaves} leaves, "
                f"so group_size must be {plan.leaves}, not {config.training.group_size}"
            )
        limit = self.settings.memory_limit_gb
        height, width = config.rollout.height or 1024, config.rollout.width or 1024
        trees = config.training.prompts_per_iteration
        # 16 latent channels at an eighth of the picture's side, as SD3, FLUX and Qwen-Image have them
        needed = trees * plan.memory(config.rollout.steps, 16 * (height // 8) * (width // 8)) / 1e9
        if limit is not None and needed > limit:
            raise ConfigError(
                f"rollout.plan: {trees} trees of {plan.leaves} leaves take {needed:.1f} GB, above memory_limit_gb "
                f"{limit:g}; fewer splits or at most {int(trees * limit / needed)} prompts_per_iteration would fit"
            )

    def rollout(self, sampler: DiffusionSampler, batch: Batch) -> tuple[Rollout, Batch]:
        roots = [batch.group.index(g) for g in dict.fromkeys(batch.group)]
        rollout, _ = sampler.tree(batch[roots])
        return rollout, batch

    def step_reward(self, sampled: SampledPictures, processes: Processes) -> Tensor:
        """[B, T + 1] the value of each node on a leaf's path, and whose row stands for it."""
        nodes = sampled.rollout.trajectory.numbered()
        value = back_up(sampled.scores.value.to(nodes.device), nodes)[:, 1:]
        # an edge is trained once: the rows that repeat it are marked by NaN
        return torch.where(first_of(nodes[:, 1:]), value, torch.nan)

    def experience(self, sampled: SampledPictures, record: Record, processes: Processes) -> ActionExperience:
        experience = super().experience(sampled, record, processes)
        assert isinstance(sampled.sampler.plan, Tree)
        experience.advantage = experience.advantage * self._kept(experience, sampled.sampler.plan)
        return experience

    def _kept(self, experience: ActionExperience, plan: Tree) -> Tensor:
        """[B, T] bool: the edges that pruning leaves."""
        pruning, nodes = self.settings.pruning, experience.rollout.trajectory.numbered()
        steps = torch.arange(nodes.shape[1] - 1, device=nodes.device)
        mask = ~torch.isin(steps + 1, steps.new_tensor(pruning.pruned(experience.batch.iteration)))
        if pruning.width is None:
            return mask.expand(len(nodes), -1)
        # the children of a node at the last split, or the whole tree
        parent = pruning.width == "parent"
        among = nodes[:, plan.splits[-1]] if parent else experience.group
        count = 1 if parent else max(2, int(pruning.keep * plan.leaves))
        leaves = best_and_worst(experience.scores.value.to(nodes.device), among, count)
        return mask & ((steps <= plan.splits[-1]) | leaves[:, None])

    def credit(self, record: Record) -> Tensor:
        once = ~record.reward.isnan()
        reward = torch.where(once, record.reward, 0.0)
        return super().credit(replace(record, reward=reward, mask=once & record.mask))
