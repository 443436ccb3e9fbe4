"""Guidance by the gradient of the reward on noisy states (Flow-NRG, arXiv 2501.13918).

To tilt the samples by exp(strength * r) is to add strength * gradient of r to the score, hence to take
strength * sigma / (1 - sigma) times the gradient from the velocity. At sigma = 1 that is infinite; there 1 - sigma is
the schedule's second, as in `flow_sde`.

Departure: r is the reward of the x0 predicted from a state, where the authors train a reward on noisy latents.
"""

from dataclasses import dataclass
from typing import ClassVar

from flowalign.search.engine import Engine


@dataclass(frozen=True)
class NRG:
    """The ODE, guided by the gradient of a differentiable reward (Flow-NRG, arXiv 2501.13918).

    Args:
        n: samples; default as many as the budget pays for.
        strength: strength of the tilt exp(strength * reward); 0 samples plainly.
    """

    name = "nrg"
    gradients: ClassVar[bool] = True
    n: int | None = None
    strength: float = 100.0

    def __call__(self, engine: Engine) -> None:
        n = engine.afford(lambda n: (3 * n * engine.steps, n * (1 + engine.steps)), self.n)
        p = engine.start(n)
        for k in range(engine.steps):
            v, reward, slope = engine.slope(p)
            p = engine.note(p, reward)
            sigma, to = engine.sigmas[k], engine.sigmas[k + 1]
            left = 1 - to if 10 * (1 - sigma) < 1 - to else 1 - sigma
            p = engine.step(p, v - self.strength * sigma / left * slope)
        engine.score(p)
