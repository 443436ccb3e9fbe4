"""Plans: which denoising steps are stochastic, and how much noise each gets.

A plan turns (number of steps, eta, iteration) into eta per step; 0 marks a deterministic step. Every sample of a
group gets the same plan, otherwise the spread of its rewards would measure the plan and not the policy.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor


class Plan(Protocol):
    """What a plan is: `etas` gives [T] noise levels for one iteration of training."""

    def etas(self, steps: int, eta: float, iteration: int, seed: int) -> Tensor: ...


@dataclass(frozen=True)
class All:
    """Every step but the last is stochastic (Flow-GRPO, DanceGRPO)."""

    def etas(self, steps: int, eta: float, iteration: int, seed: int) -> Tensor:
        return torch.tensor([eta] * (steps - 1) + [0.0])


@dataclass(frozen=True)
class Window:
    """`size` consecutive stochastic steps, ODE elsewhere (MixGRPO arXiv 2507.21802, Flow-GRPO-Fast).

    Args:
        size: number of stochastic steps, at least 1.
        start: first step of the window, counted from 0.
        stop: the window stays below this step; default the last step, which never carries noise.
        order: 'fixed' stays at start; 'progressive' moves one step on every `every` iterations and starts over
            at the end; 'random' draws a place every `every` iterations.
        every: iterations between two moves, at least 1.
    """

    size: int = 2
    start: int = 0
    stop: int | None = None
    order: Literal["fixed", "progressive", "random"] = "fixed"
    every: int = 1

    def __post_init__(self) -> None:
        if self.size < 1 or self.start < 0 or self.every < 1:
            raise ValueError("window: size and every must be at least 1 and start at least 0")

    def etas(self, steps: int, eta: float, iteration: int, seed: int) -> Tensor:
        stop = steps - 1 if self.stop is None else self.stop
        places = stop - self.size - self.start + 1
        if stop > steps - 1 or places < 1:
            raise ValueError(
                f"window: {self.size} stochastic steps from step {self.start} do not fit below step "
                f"{min(stop, steps - 1)} of a {steps}-step schedule (its last step carries no noise)"
            )
        move = iteration // self.every
        if self.order == "fixed":
            first = self.start
        elif self.order == "progressive":
            first = self.start + move % places
        else:
            first = self.start + int(np.random.default_rng([seed, move]).integers(places))
        etas = torch.zeros(steps)
        etas[first : first + self.size] = eta
        return etas


PLANS: dict[str, type] = {"all": All, "window": Window}
