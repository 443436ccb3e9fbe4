"""A reward that scores noisy states by their predicted x0 (TTSnap, arXiv 2511.22242).

From the x0 predicted at a noise level it learns to give the score of the finished picture. This is a curriculum of
levels, from the least noise to the most: each level begins with the weights of the one before, and its own weights are
saved. Published for PickScore: mean squared error, AdamW with a learning rate from 5e-7 linearly down to its half (to 0
here), 100 samples per update, one epoch per level, steps 14 to 0 of 20, 8 samples per prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from flowalign.data import Prompts
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.settings import Sampling
from flowalign.reward_training.scorer import ClipScorer
from flowalign.reward_training.supervised import fit, new_folder
from flowalign.search.noisy import REPORT


@dataclass
class Seen:
    """N samples of a generator; the samples of a prompt are next to each other."""

    texts: list[str]
    """[N]"""
    finished: list[Path]
    """[N] pictures"""
    promised: list[list[Path]]
    """[T][N] pictures of the x0 that is predicted from the state before each step."""
    sigmas: list[float]
    """[T] noise levels of those states"""


def watch(
    policy: DiffusersPolicy,
    prompts: Prompts,
    sampling: Sampling,
    per_prompt: int,
    folder: Path,
    seed: int = 0,
    progress: bool = True,
) -> Seen:
    """Sample, and save the x0 predicted from each state as pictures in a folder."""
    jobs = [n // per_prompt for n in range(len(prompts) * per_prompt)]
    promised: list[list[Path]] = []
    finished: list[Path] = []
    levels: list[float] = []
    for begin in tqdm(range(0, len(jobs), sampling.batch_size), desc="sampling", disable=not progress):
        rows = jobs[begin : begin + sampling.batch_size]
        rollout = policy.sample(
            [prompts.texts[n] for n in rows],
            range(seed + begin, seed + begin + len(rows)),
            metadata=[prompts.metadata[n] for n in rows],
            **sampling.arguments() | {"order": 1},
        )
        trajectory = rollout.trajectory
        sigmas, steps = trajectory.sigmas, trajectory.velocity.shape[1]
        levels, promised = sigmas[:steps].tolist(), promised or [[] for _ in range(steps)]
        for k in range(steps + 1):
            done = k == steps
            x0 = trajectory.final if done else trajectory.latents[:, k] - sigmas[k] * trajectory.velocity[:, k]
            for n, picture in enumerate(policy.decode_latents(rollout.whole(x0), sampling.batch_size), begin):
                path = folder / f"{n:06d}-{k:03d}.png"
                picture.save(path)
                (finished if done else promised[k]).append(path)
    return Seen([prompts.texts[n] for n in jobs], finished, promised, levels)


@torch.no_grad()
def scores(scorer: ClipScorer, files: Sequence[Path], texts: Sequence[str], batch_size: int) -> Tensor:
    """Scores [N] of pictures with their prompts."""
    batches = torch.arange(len(files)).split(batch_size)
    return torch.cat([scorer.scores([files[i] for i in rows], [texts[i] for i in rows]).cpu() for rows in batches])


def agreement(promised: Tensor, finished: Tensor, per_prompt: int) -> float:
    """Share of pairs of one prompt that both scores [N] put in the same order; a tie in `promised` counts half."""
    differences = [values.view(-1, per_prompt, 1) - values.view(-1, 1, per_prompt) for values in (promised, finished)]
    counted = differences[1] > 0
    return float(((differences[0] > 0).float() + (differences[0] == 0) / 2)[counted].mean())


def train_noisy_reward(
    scorer: ClipScorer,
    policy: DiffusersPolicy,
    prompts: Prompts,
    heldout: Prompts,
    sampling: Sampling,
    output: Path,
    per_prompt: int = 8,
    epochs: int = 1,
    learning_rate: float = 5e-7,
    batch_size: int = 100,
    seed: int = 0,
    progress: bool = True,
) -> dict[str, Any]:
    """Train a reward for each noise level of a generator, and write them to a folder that appears when it is whole.

    Args:
        heldout: prompts for the figures of the report.
        per_prompt: number of samples of each prompt, at least 2, so that they can be compared.

    Returns:
        the folder's report: for each level its noise and, on the held-out prompts, the share of pairs of samples that
        the predicted pictures put into the order of the finished ones, before and after training.
    """
    torch.manual_seed(seed)
    with TemporaryDirectory() as scratch:
        scored = []
        for name, texts, first in (("train", prompts, seed), ("heldout", heldout, seed + 10**6)):
            folder = Path(scratch, name)
            folder.mkdir()
            seen = watch(policy, texts, sampling, per_prompt, folder, first, progress)
            scored.append((seen, scores(scorer, seen.finished, seen.texts, batch_size)))
        (seen, target), (test, expected) = scored

        def agreements() -> list[float]:
            predicted = [scores(scorer, files, test.texts, batch_size) for files in test.promised]
            return [agreement(values, expected, per_prompt) for values in predicted]

        before, levels = agreements(), list[dict[str, Any]]()
        settings: dict[str, Any] = {"epochs": epochs, "learning_rate": learning_rate, "batch_size": batch_size}
        report: dict[str, Any] = {"levels": levels, "per_prompt": per_prompt, "prompts": len(prompts), **settings}
        with new_folder(output, REPORT, report | {"seed": seed}) as folder:
            for k in reversed(range(len(seen.sigmas))):

                def losses(rows: Tensor, files: list[Path] = seen.promised[k]) -> Tensor:
                    predicted = scorer.scores([files[i] for i in rows], [seen.texts[i] for i in rows])
                    return (predicted - target[rows].to(predicted.device)).square()

                parameters, rows = dict(scorer.network.named_parameters()), torch.arange(len(target))
                fit(parameters, losses, rows, **settings, weight_decay=0.01, progress=progress)
                name = f"level-{seen.sigmas[k]:.3f}"
                scorer.save(folder / name)
                after = agreement(scores(scorer, test.promised[k], test.texts, batch_size), expected, per_prompt)
                levels.append({"folder": name, "sigma": seen.sigmas[k], "before": before[k], "after": after})
    return report
