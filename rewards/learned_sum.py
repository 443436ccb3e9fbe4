"""A sum of rewards whose weights learn during the run which of them help."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rewards.base import Kind, Metadata, Reward, groups, score
from rewards.compose import Composition


class LearnedSum(Composition):
    """A primary reward plus auxiliary ones, each times a weight that learns how much it helps the primary one (after
    BARFI, arXiv 2310.19007).

    BARFI's outer loop follows the gradient of the primary return through the policy that was trained on the sum. Here
    the inner loop is one step of natural policy gradient at the samples: a weight's gradient is then, but for the
    step's length, the covariance of its reward with the primary one within groups. A heuristic that goes against the
    primary reward falls to 0, and one that has nothing to do with it keeps its weight.

    Departures: the paper solves the inner problem and differentiates implicitly, and learns the discount too. Every
    reward is asked twice an iteration, to score and to learn.

    Args:
        primary: the reward that matters.
        auxiliary: heuristics beside it.
        learning_rate: what a weight moves for a covariance of 1.
        weights: weights at the start; default 1.
        most: largest weight.
    """

    kind: Kind = "pointwise"

    def __init__(
        self,
        primary: Reward,
        auxiliary: Sequence[Reward],
        learning_rate: float = 1.0,
        weights: Sequence[float] | None = None,
        most: float = 2.0,
    ) -> None:
        if not auxiliary:
            raise ValueError("learned_sum: at least one auxiliary reward")
        if weights is not None and len(weights) != len(auxiliary):
            raise ValueError(f"learned_sum: {len(weights)} weights for {len(auxiliary)} auxiliary rewards")
        super().__init__([primary, *auxiliary], "learned_sum")
        self.learning_rate, self.most = learning_rate, most
        self.weights = torch.tensor([1.0] * len(auxiliary) if weights is None else list(weights), dtype=torch.float64)

    def combine(self, values: Tensor, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        return values[0] + self.weights.to(values) @ values[1:]

    def learn(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> dict[str, float]:
        values = torch.stack([score(reward, samples, prompts, metadata).value.double() for reward in self.rewards])
        members = [rows for rows in groups(prompts, metadata) if len(rows) > 1]
        if members:
            gradient = torch.stack([covariances(values[:, rows]) for rows in members]).mean(0)
            self.weights = (self.weights + self.learning_rate * gradient).clamp(0, self.most)
        return {f"weight/{name}": weight for name, weight in zip(self.labels[1:], self.weights.tolist(), strict=True)}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {}, {"weights": self.weights.tolist()}

    def load_state(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.weights = torch.tensor(state["weights"], dtype=torch.float64)


def covariances(values: Tensor) -> Tensor:
    """[R - 1] covariances of the other rewards with the first over a group, from [R, N] values, without bias."""
    apart = values - values.mean(1, keepdim=True)
    return apart[1:] @ apart[0] / (values.shape[1] - 1)
