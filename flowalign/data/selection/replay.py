"""Replay of informative groups: groups with spread are kept, to stand in for later ones without."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from flowalign.data.batches import Batch
from rewards import Scores


@dataclass(kw_only=True)
class StoredGroup:
    """Samples of one prompt from an iteration, on the CPU."""

    tensors: dict[str, Tensor]
    """Tensors of the rollout; its log-probabilities, to which the loss's ratio is, are of the sampling weights."""
    rest: dict[str, Any]
    """Everything else of the rollout, as JSON."""
    batch: Batch
    scores: Scores
    spread: float
    """Standard deviation of its rewards."""

    def at(self, slot: int, iteration: int, branches: int = 1) -> Batch:
        """The samples as if drawn for a prompt of another iteration.

        Args:
            branches: groups that an iteration makes of a prompt.
        """
        group = [slot * branches + number % branches for number in self.batch.group]
        return replace(self.batch, group=group, iteration=iteration, picks=[-1] * len(self.batch))


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
        self.stored: list[StoredGroup] = []

    def put(self, stored: Sequence[StoredGroup]) -> None:
        """Keep groups, oldest first."""
        self.stored = [*self.stored, *stored][-self.groups :]

    def take(self, count: int, iteration: int, seed: int) -> list[StoredGroup]:
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
            rollout = {f"rollout.{name}": value for name, value in group.tensors.items()}
            scores = {f"scores.{name}": value for name, value in group.scores.parts.items()}
            columns = {name: getattr(group.scores, name) for name in ("value", "weight", "missing")}
            named = rollout | {name: column for name, column in columns.items() if column is not None} | scores
            tensors |= {f"{i}.{name}": value for name, value in named.items()}
            rest.append(
                {
                    "batch": vars(group.batch),
                    "rollout": group.rest,
                    "tensors": list(group.tensors),
                    "parts": list(group.scores.parts),
                    "steps": group.scores.steps,
                    "spread": group.spread,
                }
            )
        return tensors, rest

    def load_state(self, tensors: dict[str, Tensor], rest: list[dict[str, Any]]) -> None:
        """The inverse of `state`."""
        self.stored = []
        for i, record in enumerate(rest):
            rollout = {name: tensors[f"{i}.rollout.{name}"] for name in record["tensors"]}
            columns = {name: tensors[f"{i}.scores.{name}"] for name in record["parts"]}
            weight, missing = tensors.get(f"{i}.weight"), tensors.get(f"{i}.missing")
            scores = Scores(tensors[f"{i}.value"], columns, record["steps"], weight, missing=missing)
            batch = Batch(**record["batch"])
            self.stored.append(
                StoredGroup(
                    tensors=rollout, rest=record["rollout"], batch=batch, scores=scores, spread=record["spread"]
                )
            )
