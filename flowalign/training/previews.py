"""What the trainer saves so that people can look: film strips and groups of a few fixed prompts, texts by token."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowalign.actors.diffusion import DiffusionActor
from flowalign.actors.draw import Draw
from flowalign.algorithms.base import Algorithm, Seen
from flowalign.config import Config
from flowalign.core.credit import dense_rewards, turning_points
from flowalign.data import Prompts, draw_batch
from flowalign.policies.language.given import characters
from flowalign.runs.previews import Film, Group, Texts, save_previews
from samplers.completion import completions
from samplers.plans import Tree

MEMBERS = 8
"""samples a prompt, at most"""


@torch.no_grad()
def preview(
    actor: DiffusionActor, algorithm: Algorithm, config: Config, prompts: Prompts, folder: Path, iteration: int
) -> None:
    """Sample a group of each of a few prompts as the algorithm does, and save how its members came to be.

    The same prompts, start and step noises each time. It counts neither as forwards nor as reward calls.
    """
    count = min(config.training.previews, len(prompts))
    # a tree has as many leaves as it has
    members = actor.plan.leaves if isinstance(actor.plan, Tree) else min(config.training.group_size, MEMBERS)
    batch = draw_batch(prompts.spread(count), 0, count, members, config.training.seed, config.rollout.share_start_noise)
    with actor.alone():
        seen = algorithm.show(actor, dataclasses.replace(batch, iteration=iteration))
        # an algorithm that branches makes several groups of a prompt: the first one is shown
        firsts = [seen.batch.prompts.index(prompt) for prompt in dict.fromkeys(seen.batch.prompts)]
        films = [_film(actor, seen, row) for row in firsts]
        groups = [_group(seen, seen.batch.group[row]) for row in firsts]
    save_previews(folder, iteration, films, groups)


def _film(actor: DiffusionActor, seen: Seen, row: int) -> Film:
    """What every state of a sample would end in, and what its steps earned."""
    trajectory = seen.rollout.trajectory[row : row + 1]
    one = seen.rollout.branch(trajectory, torch.tensor([row], device=actor.device))
    made = completions(actor.policy.at(one), trajectory)
    ends = actor.policy.decode(one.whole(made.latents, made.samples))
    values = actor.score(ends, seen.batch, [row] * len(ends), made.steps.tolist()).value[made.index.cpu()]
    return Film(
        seen.batch.prompts[row],
        seen.batch.seeds[row],
        [ends[state] for state in made.index[0].tolist()],
        rewards=values[0].tolist(),
        dense=dense_rewards(values)[0].tolist(),
        advantages=None if seen.advantage is None else seen.advantage[row].tolist(),
        stochastic=trajectory.mask[0].tolist(),
        turning=turning_points(values, trajectory.mask.cpu())[0].tolist(),
        sigmas=trajectory.sigmas.tolist(),
        metadata=seen.batch.metadata[row],
    )


def _group(seen: Seen, number: int) -> Group:
    """The members of a group; a member's advantage is the mean over the steps that have one."""
    rows = [row for row, group in enumerate(seen.batch.group) if group == number]

    def of(values: Tensor) -> list[float]:
        return values[rows].tolist()

    parts = dict(seen.scores.parts)
    if not torch.equal(seen.reward.cpu(), seen.scores.value):
        parts["score"] = seen.scores.value
    return Group(
        seen.batch.prompts[rows[0]],
        [seen.batch.noise_seeds[row] for row in rows],
        [seen.images[row] for row in rows],
        of(seen.reward),
        advantages=None if seen.advantage is None else of(seen.advantage.nanmean(1)),
        parts={name: of(part) for name, part in parts.items()},
        wins=None if seen.wins is None else seen.wins[rows][:, rows].tolist(),
        metadata=seen.batch.metadata[rows[0]],
    )


@torch.no_grad()
def preview_texts(
    actor: Any, algorithm: Algorithm, config: Any, prompts: Prompts, folder: Path, iteration: int
) -> None:
    """Sample a group of each of a few prompts as the algorithm does, and save what each token earned.

    The same prompts and draws each time. It counts neither as forwards nor as reward calls.
    """
    count, members = min(config.training.previews, len(prompts)), min(config.training.group_size, MEMBERS)
    batch = draw_batch(prompts.spread(count), 0, count, members, config.training.seed, False)
    with actor.alone():
        experience = algorithm.collect(actor, Draw(actor, dataclasses.replace(batch, iteration=iteration)))
    rollout, advantage = experience.rollout, experience.advantage
    groups = []
    for number in dict.fromkeys(batch.group):
        rows = [row for row, group in enumerate(batch.group) if group == number]
        texts = actor.policy.decode(rollout[torch.tensor(rows)])
        tokens = []
        for row, text in zip(rows, texts, strict=True):
            there = rollout.present[row]
            ends = characters(actor.policy, rollout.completion_ids[row][there].tolist())
            pieces = [text[start:end] for start, end in zip([0, *ends], ends)]
            # what an environment answered has no numbers
            columns = (rollout.log_prob[row], rollout.entropy[row], advantage[row])
            values = zip(*(column.where(rollout.mask[row], torch.nan)[there] for column in columns))
            tokens.append([(piece, *map(float, own)) for piece, own in zip(pieces, values, strict=True)])
        earned = [float(advantage[row][rollout.mask[row]].mean()) for row in rows]
        groups.append(
            Texts(
                batch.prompts[rows[0]],
                [batch.noise_seeds[row] for row in rows],
                texts,
                tokens,
                experience.reward[rows].tolist(),
                earned,
                {name: part[rows].tolist() for name, part in experience.scores.parts.items()},
                batch.metadata[rows[0]],
            )
        )
    save_previews(folder, iteration, groups=groups)
