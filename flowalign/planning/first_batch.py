"""What the first groups of a run say: spread of their rewards, and gradients of parts of a batch."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from flowalign.algorithms.base import Experience
from flowalign.data.batches import draw_batch
from flowalign.evaluation.statistics import Interval, redrawn, share_interval
from flowalign.planning.probed import GroupSpread
from flowalign.rollouts.pictures import DiffusionSampler
from flowalign.training import Trainer

Array = NDArray[np.float64]

PARTS = 8
"""Parts of a batch whose gradients are compared."""
COORDINATES = 2**22
"""Most parameters that a gradient is looked at in; they are spread evenly over all."""
STEP_PROMPTS = 8
"""Prompts whose groups show where noise spreads the reward."""


def first_batch(trainer: Trainer) -> tuple[GroupSpread | None, Array, float]:
    """Rewards of the first groups, and the gradients [K, D] of parts of them, each of other groups.

    Small iterations are repeated until each part has a group.

    Returns:
        the spread, the gradients, and the groups of a part.
    """
    spreads: list[list[float]] = []
    gradients: list[Array] = []
    rounds = -(-PARTS // trainer.config.training.prompts_per_iteration)
    for _ in range(rounds):
        experience = trainer.experience()
        spreads += group_values(experience)
        groups = list(dict.fromkeys(experience.batch.group))
        items = experience.items.unflatten(0, (len(groups), -1))
        parts = min(PARTS, len(groups)) if rounds == 1 else len(groups)
        for chunk in items.tensor_split(parts):
            gradient = trainer.learner.gradient(experience, chunk.flatten(0, 1), most=COORDINATES)
            gradients.append(gradient.numpy().astype(np.float64))
        trainer.iteration += 1
    trainer.iteration = 0
    even = len(gradients) - len(gradients) % 2
    return spread_of(spreads) if spreads else None, np.stack(gradients[:even]), len(groups) / parts


def group_values(experience: Experience) -> list[list[float]]:
    """Rewards of each group; an empty list where the method compares no samples."""
    outcome = experience.outcome()
    if outcome is None:
        return []
    values: dict[int, list[float]] = {}
    for group, value in zip(experience.batch.group, outcome[0].tolist(), strict=True):
        values.setdefault(group, []).append(value)
    return list(values.values())


def spread_of(groups: Sequence[Sequence[float]]) -> GroupSpread:
    """Spread of the rewards of groups of one size."""
    table = np.array(groups, dtype=np.float64)
    variances = table.var(axis=1, ddof=1)
    dead = int((np.ptp(table, axis=1) == 0).sum())
    draws = np.sqrt(redrawn(len(table)) @ variances / len(table))
    low, high = np.quantile(draws, (0.025, 0.975)).tolist()
    share = dead / len(table)
    return GroupSpread(
        groups=len(table),
        size=table.shape[1],
        within=Interval(float(variances.mean() ** 0.5), low, high),
        dead=Interval(share, *share_interval(share, len(table))),
    )


def spread_by_step(trainer: Trainer) -> dict[int, GroupSpread]:
    """Spread of groups that share their start and have noise in one denoising step alone, for each step but the last.

    Methods whose samples differ by other noise than the kernel's have none.
    """
    sampler, training = trainer.sampler, trainer.config.training
    if not isinstance(sampler, DiffusionSampler) or trainer.algorithm.noise != "kernel":
        return {}
    rollout, algorithm = sampler.config.rollout, trainer.algorithm
    if not rollout.eta or not rollout.share_start_noise or rollout.plan.name not in ("all", "window"):
        return {}
    batch = draw_batch(trainer.prompts, 0, STEP_PROMPTS, training.group_size, training.seed, True)
    spreads = {}
    for step in range(rollout.steps - 1):
        eta = torch.zeros(rollout.steps)
        eta[step] = rollout.eta
        with torch.no_grad(), trainer.learner.sampling():
            pictures = sampler.decode(sampler.rollout(batch, eta))
        values = algorithm.score(trainer.scorer, pictures, batch).value
        spreads[step] = spread_of(values.view(-1, training.group_size).tolist())
    return spreads


def noisy_steps(trainer: Trainer) -> list[int]:
    """Denoising steps of the first iteration that have noise."""
    if not isinstance(trainer.sampler, DiffusionSampler) or trainer.algorithm.noise != "kernel":
        return []
    rollout = trainer.sampler.config.rollout
    etas = trainer.sampler.plan.etas(rollout.steps, rollout.eta, 0, trainer.config.training.seed)
    return [int(step) for step in (etas.view(-1, rollout.steps)[0] > 0).nonzero()[:, 0]]
