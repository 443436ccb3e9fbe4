"""The audit of an iteration's noise: seeds and start noises that repeat among prompts and processes teach nothing new.

Samples of one prompt may share a start noise on purpose (`rollout.share_start_noise`, trees, branches); samples of
different prompts, or of different processes, never do.
"""

import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from flowalign.errors import FlowalignError
from flowalign.policies.diffusion import Rollout
from flowalign.rollouts.processes import Processes
from flowalign.rollouts.sampler import Sampled
from samplers.noise import fingerprints

CHANCE = 1e-6
"""Probability below which seeds do not repeat by chance."""
SEEDS = 2**32
"""Number of seeds that `derive_seed` draws from."""


def audit(sampled: Sampled[Any, Any], processes: Processes, whole: bool) -> dict[str, float]:
    """Metrics of an iteration over all processes: distinct seeds, and distinct start noises of pictures.

    Args:
        whole: every start noise is the seed's, but on shared paths; otherwise samples of a prompt may share theirs.

    Raises:
        FlowalignError: they repeat more often than by chance.
    """
    rollout, batch = sampled.rollout, sampled.batch
    pictures = isinstance(rollout, Rollout) and len(rollout) == len(batch)
    seeds = batch.seeds if pictures else batch.noise_seeds
    # groups of earlier iterations, whose pick is -1, may be several of one prompt
    drawn = _distinct(list(zip(batch.picks, seeds, strict=True)), torch.tensor(seeds), processes)
    metrics = {"noise/seeds": float(drawn[1])}
    if pictures:
        trajectory = rollout.trajectory
        hashes = fingerprints(trajectory.latents[:, 0])
        own: Sequence[Any] = seeds if trajectory.nodes is None else trajectory.nodes[:, 0].tolist()
        draws = list(zip(batch.picks, own if whole else hashes.tolist(), strict=True))
        starts = _distinct(draws, hashes, processes)
        metrics["noise/starts"] = float(starts[1])
        _check(*starts, f"iteration {batch.iteration}: start noises", drawn[1] < starts[0])
    _check(*drawn, f"iteration {batch.iteration}: seeds", True)
    return metrics


def _distinct(draws: Sequence[Hashable], values: Tensor, processes: Processes) -> tuple[int, int]:
    """Numbers of draws and of distinct values over all processes.

    Args:
        draws: the draw of each sample; processes share none.
        values: [B] integers.
    """
    numbers = {draw: number for number, draw in enumerate(dict.fromkeys(draws))}
    own = torch.tensor([numbers[draw] for draw in draws]) + processes.row * 2**32
    pairs = torch.stack([own.to(processes.device), values.to(processes.device)], 1)
    return tuple(len(column.unique()) for column in processes.gather(pairs).unbind(1))  # type: ignore[return-value]


def _check(draws: int, distinct: int, what: str, seeds_repeat: bool) -> None:
    """Refuse values that repeat more often than `draws` numbers among 2^32 do by chance, a Poisson number of times."""
    missing, expected = draws - distinct, draws**2 / (2 * SEEDS)
    if missing and missing * math.log(expected) - math.lgamma(missing + 1) < math.log(CHANCE):
        cause = "seeds repeat among prompts or processes" if seeds_repeat else "the pipeline did not use its seeds"
        raise FlowalignError(
            f"{what}: {draws} are drawn, and {distinct} of them are distinct: {cause}; an algorithm, a selection or a "
            "pipeline of your own may be why (docs/rollouts.md)"
        )
