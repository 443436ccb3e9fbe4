"""Evaluation on held-out prompts: the same prompts and seeds every time; pictures by the ODE sampler."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator

from flowalign.data import Prompts
from flowalign.policies.base import Policy
from rewards import Reward, score


@dataclass
class Evaluated:
    """Scores of N pictures, over all processes, in the order of the prompts."""

    prompts: list[str]
    metadata: list[dict[str, Any]]
    seeds: list[int]
    value: list[float]
    parts: dict[str, list[float]]
    images: list[Any]
    """this process's pictures, or texts: on one process all, otherwise those of every n-th prompt"""
    rows: list[int]
    """which of the N each of this process's pictures is"""

    def samples(self) -> list[tuple[Any, dict[str, Any]]]:
        """This process's pictures, each with what `save_samples` writes of it."""
        listed = []
        for i, image in zip(self.rows, self.images, strict=True):
            record = {"prompt": self.prompts[i], "seed": self.seeds[i], "metadata": self.metadata[i]}
            scores = {"reward": self.value[i], **{name: values[i] for name, values in self.parts.items()}}
            listed.append((image, record | scores))
        return listed

    def means(self, by: str = "category") -> dict[str, dict[str, float]]:
        """Mean value and parts over all pictures ('all') and over those of each value of a metadata key."""
        own = [str(record[by]) if by in record else None for record in self.metadata]
        table: dict[str, dict[str, float]] = {}
        for label in ["all", *sorted({name for name in own if name is not None})]:
            rows = [i for i, name in enumerate(own) if label in ("all", name)]
            columns = {"reward": self.value, **self.parts}
            for name, column in columns.items():
                # NaN marks pictures that a part does not apply to
                known = [column[i] for i in rows if column[i] == column[i]]
                if known:
                    table.setdefault(label, {})[name] = sum(known) / len(known)
            table[label]["samples"] = len(rows)
        return table


def evaluate(
    policy: Policy,
    reward: Reward,
    prompts: Prompts,
    sampling: Any,
    per_prompt: int,
    seed: int,
    accelerator: Accelerator | None = None,
) -> Evaluated:
    """Sample each prompt `per_prompt` times as an evaluation section says, and score the samples.

    Picture n of the list starts from the noise of `torch.Generator().manual_seed(seed + n)`, so plain diffusers
    makes it again; text n draws from it.
    """
    texts = [text for text in prompts.texts for _ in range(per_prompt)]
    metadata = [record for record in prompts.metadata for _ in range(per_prompt)]
    seeds = list(range(seed, seed + len(texts)))
    process, processes = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    # the pictures of a prompt stay together, for rewards that look at groups
    mine = [i for i in range(len(texts)) if i // per_prompt % processes == process]
    rows: list[dict[str, Any]] = []
    images: list[Any] = []
    forwards = policy.forwards
    # as many on every process, since a network in shards runs on all of them or on none
    share = -(-len(prompts) // processes) * per_prompt
    made = mine + [0] * (share - len(mine))
    own = [metadata[i] for i in made]
    images = policy.make([texts[i] for i in made], [seeds[i] for i in made], sampling, own)[: len(mine)]
    if mine:
        grouped = [metadata[i] | {"group": i // per_prompt, "seed": seeds[i]} for i in mine]
        scores = score(reward, images, [texts[i] for i in mine], grouped)
        for row, i in enumerate(mine):
            parts = {name: float(values[row]) for name, values in scores.parts.items()}
            rows.append({"i": i, "value": float(scores.value[row]), "parts": parts})
    # evaluation is not training: it does not count
    policy.forwards = forwards
    if accelerator is not None and processes > 1:
        rows = _gather(rows)
    rows.sort(key=lambda row: row["i"])
    names: Sequence[str] = list(rows[0]["parts"])
    return Evaluated(
        texts,
        metadata,
        seeds,
        [row["value"] for row in rows],
        {name: [row["parts"][name] for row in rows] for name in names},
        images,
        mine,
    )


def _gather(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, rows)
    return [row for part in everyone for row in part]
