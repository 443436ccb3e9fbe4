"""BranchGRPO: trees of trajectories with shared prefixes (arXiv 2509.06040).

Rollout: from one start noise a prompt, samples split at the plan's steps, each child with its own noise; a shared
prefix is computed once. Credit: a leaf is worth its reward, an inner node the mean of the leaves under it; at each
depth the nodes of a tree are normalised against each other, and the advantage of a node belongs to the step that
led to it. Loss: PPO's clip on every edge of the tree, once.

`group_size` must be the number of leaves. Departure: noise at a split is not enlarged (the released code does so
without telling the log-probability), and pruning is left out.
"""

from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor

from flowalign.actors.diffusion import DiffusionActor
from flowalign.algorithms.trajectory import base as trajectory
from flowalign.algorithms.trajectory.base import TrajectoryAlgorithm
from flowalign.config import Config
from flowalign.core.credit import back_up, first_of
from flowalign.core.record import Record
from flowalign.data.batches import Batch
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import Rollout
from rewards import Scores
from samplers.plans import Tree


class BranchGRPOSettings(trajectory.PolicySettings):
    memory_limit_gb: float | None = Field(None, gt=0)
    """refuse trees whose stored trajectories take more than this, over all prompts of an iteration"""


class BranchGRPO(TrajectoryAlgorithm):
    """BranchGRPO: tree rollouts, leaf rewards backed up to the branches (arXiv 2509.06040)."""

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

    def rollout(self, actor: DiffusionActor, batch: Batch) -> tuple[Rollout, Batch]:
        roots = [batch.group.index(g) for g in dict.fromkeys(batch.group)]
        rollout, _ = actor.tree(batch[roots])
        return rollout, batch

    def step_reward(self, actor: DiffusionActor, rollout: Rollout, batch: Batch, scores: Scores) -> Tensor:
        """[B, T + 1] the value of each node on a leaf's path, and whose row stands for it."""
        nodes = rollout.trajectory.numbered()
        value = back_up(scores.value.to(nodes.device), nodes)[:, 1:]
        # an edge is trained once: the rows that repeat it are marked by NaN
        return torch.where(first_of(nodes[:, 1:]), value, torch.nan)

    def credit(self, record: Record) -> Tensor:
        once = ~record.reward.isnan()
        reward = torch.where(once, record.reward, 0.0)
        return super().credit(replace(record, reward=reward, mask=once & record.mask))
