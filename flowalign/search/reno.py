"""ReNO (arXiv 2406.04312): the start noise of a one-step model, improved along the gradient of the reward.

Published: 50 iterations, SGD with Nesterov momentum 0.9 and learning rate 5, gradients of norm 0.1 at most, and 0.01
times the negative log-probability of the noise's norm; 5 * HPSv2 + ImageReward + 0.05 * PickScore + 0.01 * CLIP, the
last two of percent.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flowalign.search.engine import Engine
from flowalign.search.optimizing import optimize


def improbability(noise: Tensor) -> Tensor:
    """Negative log-probability of the norm of a standard normal [d], without constants: least at sqrt(d - 1)."""
    square = noise.square().sum()
    return square / 2 - (noise.numel() - 1) * square.log() / 2


@dataclass(frozen=True, kw_only=True)
class ReNO:
    """The start noise of a one-step model, improved along the gradient of the reward (ReNO, arXiv 2406.04312).

    Args:
        iterations: default as many as the budget pays for.
        learning_rate, momentum: of SGD; the momentum is Nesterov's.
        clip: largest norm of a gradient.
        regularization: weight of the noise's improbability, beside the reward.
    """

    name = "reno"
    gradients: ClassVar[bool] = True
    one_step: ClassVar[bool] = True
    iterations: int | None = None
    learning_rate: float = 5.0
    momentum: float = 0.9
    clip: float = 0.1
    regularization: float = 0.01

    def __call__(self, engine: Engine) -> None:
        count = engine.afford(lambda n: (3 * n - 2, n), self.iterations)
        p = engine.start(1)
        noise = p.x.clone()
        optimizer = torch.optim.SGD([noise], self.learning_rate, self.momentum, nesterov=True)

        def generate() -> Tensor:
            return engine.x0(p.replace(x=noise), engine.velocity(noise, p.step))

        def loss(x: Tensor, score: float) -> Tensor:
            return self.regularization * improbability(noise) - engine.value(x).sum()

        optimize(engine, [noise], optimizer, generate, loss, count, self.clip)
