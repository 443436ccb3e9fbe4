"""What a run that trains a prompt rewriter saves so that people can look: rewritten prompts with their pictures."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flowalign.actors.draw import Draw
from flowalign.core.record import masked_mean
from flowalign.data import Prompts, draw_batch
from flowalign.policies.rendering import Rendered
from flowalign.runs.previews import Group, save_previews
from flowalign.runs.samples import save_samples

MEMBERS = 8
"""texts a prompt, at most"""


def keep_rewrites(drawn: Rendered, samples: Sequence[tuple[str, dict[str, Any]]], folder: Path, iteration: int) -> None:
    """Save an evaluation's texts as the gallery reads them: each with the picture that it was scored by."""
    texts = [text for text, _ in samples]
    images = drawn.render(texts, [record for _, record in samples])
    records = [record | {"rewritten": drawn.prompt(text)} for text, record in samples]
    save_samples(folder, iteration, zip(images, records, strict=True))


@torch.no_grad()
def preview_rewrites(
    drawn: Rendered, actor: Any, algorithm: Any, config: Any, prompts: Prompts, folder: Path, iteration: int
) -> None:
    """Rewrite a few prompts as the algorithm does, and save the groups: the same prompts and draws each time."""
    count = min(config.training.previews, len(prompts))
    members = min(config.training.group_size, MEMBERS)
    batch = draw_batch(prompts.spread(count), 0, count, members, config.training.seed, share_start_noise=True)
    with actor.alone():
        seen = algorithm.collect(actor, Draw(actor, dataclasses.replace(batch, iteration=iteration)))
        texts = actor.policy.decode(seen.rollout)
        images = drawn.render(texts, actor.metadata(batch, range(len(batch))))
    advantage = masked_mean(seen.advantage, seen.rollout.mask)
    groups = []
    for number in range(count):
        rows = slice(number * members, (number + 1) * members)
        groups.append(
            Group(
                batch.prompts[rows.start],
                batch.noise_seeds[rows],
                images[rows],
                seen.scores.value[rows].tolist(),
                advantages=advantage[rows].tolist(),
                parts={name: part[rows].tolist() for name, part in seen.scores.parts.items()},
                rewritten=[drawn.prompt(text) for text in texts[rows]],
                metadata=batch.metadata[rows.start],
            )
        )
    save_previews(folder, iteration, groups=groups)
