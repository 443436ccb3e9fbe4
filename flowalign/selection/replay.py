"""Replay of informative groups: groups with spread are kept, to stand in for later ones without."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowalign.data import Batch
from flowalign.policies.text_rollout import Taken, TextRollout
from rewards import Scores


@dataclass
class Stored:
    """One group as it was sampled, on the CPU."""

    rollout: TextRollout
    """its `log_prob` is that of the weights that sampled it, so that the loss's ratio is against those"""
    batch: Batch
    scores: Scores
    spread: float
    """standard deviation of its rewards"""

    def at(self, slot: int, iteration: int) -> Batch:
        """Its samples as a group of another iteration."""
        rows = len(self.batch)
        own = self.batch
        return Batch(own.prompts, own.metadata, [slot] * rows, own.seeds, own.noise_seeds, iteration, [-1] * rows)


class Replay:
    """The newest groups that had spread; the more spread, the likelier one is replayed.

    A group without spread is replaced by a stored one and stored groups are drawn by how much their rewards differ, as
    in TRL's GRPO with a replay buffer; what is stored leaves in the order it came and at an age, since off-policy
    samples go stale (arXiv 2506.05316, 2606.04560). Every process holds the same groups.

    Args:
        groups: how many are kept at most.
        age: iterations after which one is forgotten.
    """

    def __init__(self, groups: int, age: int) -> None:
        self.groups, self.age = groups, age
        self.stored: list[Stored] = []

    def put(self, stored: Sequence[Stored]) -> None:
        """Keep groups, oldest first."""
        self.stored = [*self.stored, *stored][-self.groups :]

    def take(self, count: int, iteration: int, seed: int) -> list[Stored]:
        """At most so many different groups, drawn with probabilities proportional to their spreads."""
        self.stored = [group for group in self.stored if iteration - group.batch.iteration <= self.age]
        if not self.stored:
            return []
        spreads = np.array([group.spread for group in self.stored])
        random = np.random.default_rng([seed, iteration, 7])
        drawn = random.choice(len(spreads), min(count, len(spreads)), replace=False, p=spreads / spreads.sum())
        return [self.stored[i] for i in drawn]

    def state(self) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """Tensors by name, and JSON."""
        tensors: dict[str, Tensor] = {}
        rest = []
        for i, group in enumerate(self.stored):
            rollout = {name: getattr(group.rollout, name) for name in _TENSORS}
            scores = {f"scores.{name}": value for name, value in group.scores.parts.items()}
            named = rollout | {"value": group.scores.value} | scores
            tensors |= {f"{i}.{name}": value for name, value in named.items()}
            rest.append(
                {
                    "batch": vars(group.batch),
                    "parts": list(group.scores.parts),
                    "steps": group.scores.steps,
                    "temperature": group.rollout.temperature,
                    "episodes": group.rollout.episodes,
                    "spread": group.spread,
                }
            )
        return tensors, rest

    def load_state(self, tensors: dict[str, Tensor], rest: list[dict[str, Any]]) -> None:
        """The inverse of `state`."""
        self.stored = []
        for i, record in enumerate(rest):
            batch = Batch(**record["batch"])
            kept: dict[str, Any] = {name: tensors[f"{i}.{name}"] for name in _TENSORS}
            episodes = [[Taken(*turn) for turn in own] for own in record["episodes"]]
            rollout = TextRollout(batch.prompts, temperature=record["temperature"], episodes=episodes, **kept)
            parts = {name: tensors[f"{i}.scores.{name}"] for name in record["parts"]}
            scores = Scores(tensors[f"{i}.value"], parts, record["steps"])
            self.stored.append(Stored(rollout, batch, scores, record["spread"]))


_TENSORS = [field.name for field in fields(TextRollout) if field.type is Tensor]


def alone(rollout: TextRollout, batch: Batch, scores: Scores, rows: Sequence[int], spread: float) -> Stored:
    """A group of an iteration, to be stored."""
    members = torch.tensor(list(rows))
    return Stored(rollout[members.to(rollout.mask.device)].to("cpu"), batch[rows], scores[members], spread)
