"""What the trainer saves so that people can look: the film strips and groups of a few fixed prompts."""

import dataclasses
from pathlib import Path

import torch

from flowalign.config import Config
from flowalign.core.advantages import group_advantage
from flowalign.core.credit import dense_rewards, turning_points
from flowalign.data import Prompts, draw_batch
from flowalign.gallery.previews import Film, Group, save_previews
from flowalign.training.actor import Actor
from rewards.dense import Estimator
from samplers.completion import completions

MEMBERS = 8
"""samples a prompt, at most"""


def preview(actor: Actor, config: Config, prompts: Prompts, folder: Path, iteration: int) -> None:
    """Sample a group of each of the first few prompts as training does, and save how its members came to be.

    The same prompts, start and step noises each time. It counts neither as forwards nor as reward calls.
    """
    forwards, calls = actor.policy.forwards, actor.reward_calls
    count = min(config.training.previews, len(prompts))
    members = min(config.training.group_size, MEMBERS)
    fixed = prompts.spread(count)
    batch = draw_batch(fixed, 0, count, members, config.training.seed, config.rollout.share_start_noise)
    batch = dataclasses.replace(batch, iteration=iteration)
    rollout = actor.rollout(batch)
    images = actor.decode(rollout)
    scores = actor.score(images, batch)
    values = actor.values(rollout, batch, scores.value, Estimator())
    advantage = group_advantage(scores.value, torch.tensor(batch.group))
    dense, turning = dense_rewards(values), turning_points(values)
    films, groups = [], []
    for g in range(count):
        rows = range(g * members, (g + 1) * members)
        first = rollout.trajectory[rows.start : rows.start + 1]
        one = rollout.branch(first, torch.tensor([rows.start], device=actor.device))
        made = completions(actor.policy.at(one), first)
        ends = actor.policy.decode(made.latents)
        i = rows.start
        films.append(
            Film(
                batch.prompts[i],
                batch.seeds[i],
                [ends[state] for state in made.index[0].tolist()],
                rewards=values[i].tolist(),
                dense=dense[i].tolist(),
                advantages=[float(advantage[i])] * dense.shape[1],
                stochastic=first.mask[0].tolist(),
                turning=turning[i].tolist(),
                sigmas=first.sigmas.tolist(),
                metadata=batch.metadata[i],
            )
        )
        groups.append(
            Group(
                batch.prompts[i],
                [batch.noise_seeds[row] for row in rows],
                [images[row] for row in rows],
                [float(scores.value[row]) for row in rows],
                advantages=[float(advantage[row]) for row in rows],
                parts={name: [float(part[row]) for row in rows] for name, part in scores.parts.items()},
                metadata=batch.metadata[i],
            )
        )
    save_previews(folder, iteration, films, groups)
    actor.policy.forwards, actor.reward_calls = forwards, calls
