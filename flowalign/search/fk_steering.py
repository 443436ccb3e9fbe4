"""Feynman-Kac steering (arXiv 2501.06848): particles multiply or die by the reward of the x0 that they promise.

The product of all potentials of a path is exp(strength * reward of its end), whichever potentials are chosen on the
way, so that with weights the particles are samples of the model tilted by exp(strength * reward).

Departures: the comb of `systematic` in the place of independent draws, which are as unbiased and vary more; weights
are carried on while nothing is resampled, where the authors' adaptive mode drops them; the potential at a step is of
its own state, where the authors' is of the state before; with `max` and `add` the last potential brings the product to
exp(strength * reward of the end), where the authors' (fkd_class.py) brings it to that of the path's largest reward or
sum: with strength 10 a path of rewards 1, then 0.4 weighs exp(10) there, and exp(4) here.

Published: strength 10, 4 particles, resampled at steps 0, 20, 40, 60 and 80 of 100.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowalign import registry
from flowalign.search.engine import Engine
from flowalign.search.weights import ParticleWeights
from samplers import All, check_eta
from samplers.rows import Rows

Kind = Literal["diff", "max", "add", "rt"]


@dataclass
class Potentials(Rows):
    """State of N particles' potentials, which goes with them when they are resampled."""

    memory: Tensor
    """[N] memory of the scores so far: the last for diff, the largest for max, their sum for add."""
    product: Tensor
    """[N] logarithm of the potentials so far, multiplied"""

    @classmethod
    def begin(cls, kind: Kind, count: int) -> "Potentials":
        """Before the first."""
        return cls(torch.full((count,), -torch.inf if kind == "max" else 0.0), torch.zeros(count))

    def next(self, kind: Kind, strength: float, score: Tensor, last: bool = False) -> tuple[Tensor, "Potentials"]:
        """[N] the logarithm of the potential of particles that score [N], and what the next depends on.

        Args:
            last: samples are finished, whose potential is what is missing from exp(strength * score).
        """
        memory = {"diff": score, "max": self.memory.maximum(score), "add": self.memory + score, "rt": score}[kind]
        log = strength * (score - self.memory if kind == "diff" else memory)
        if last:
            log = strength * score - self.product
        return log, Potentials(memory, self.product + log)


@dataclass(frozen=True, kw_only=True)
class FKSteering:
    """Particles multiply or die by the reward of the x0 that they promise (FK steering, arXiv 2501.06848).

    Args:
        particles: default as many as the budget pays for.
        strength: lambda, of the tilt exp(lambda * reward); 0 samples plainly.
        potential: weight of a particle on its way: diff exp(lambda * (r - r before)), max exp(lambda * largest r), add
            exp(lambda * sum of r), rt exp(lambda * r).
        resamplings: how often, evenly over the schedule from its start.
        below: share of the particles; resampled is where the effective sample size is smaller. 1 is always, 0.5 the
            authors' adaptive mode.
        kernel, eta: of the steps, which need noise to be different.
    """

    name = "fk_steering"
    particles: int | None = None
    strength: float = 10.0
    potential: Kind = "diff"
    resamplings: int = 5
    below: float = 1.0
    kernel: str = "cps"
    eta: float = 0.7

    def __post_init__(self) -> None:
        check_eta(registry.resolve("kernels", self.kernel, "kernel"), self.eta)
        if self.resamplings < 1 or not 0 <= self.below <= 1:
            raise ValueError(f"resamplings {self.resamplings} and below {self.below:g}: at least 1, and from 0 to 1")

    def __call__(self, engine: Engine) -> None:
        at = {i * engine.steps // self.resamplings for i in range(self.resamplings)}
        n = engine.afford(lambda n: (n * engine.steps, n * (1 + len(at))), self.particles)
        kernel = registry.resolve("kernels", self.kernel, "kernel")
        eta = All().etas(engine.steps, self.eta, 0, 0)
        p, sources = engine.start(n), engine.noise(n)
        weights, potentials = ParticleWeights(n), Potentials.begin(self.potential, n)
        for k in range(engine.steps):
            v = engine.velocity(p.x, p.step)
            if k in at:
                p = engine.score(p, engine.x0(p, v))
                log, potentials = potentials.next(self.potential, self.strength, p.score)
                weights.add(log)
                rows = weights.resample(self.below, engine.random)
                if rows is not None:
                    p, v, potentials = engine.keep(p, rows), v[rows.to(v.device)], potentials[rows]
            p = engine.step(p, v, kernel, eta, sources)
        p = engine.score(p)
        weights.add(potentials.next(self.potential, self.strength, p.score, last=True)[0])
        engine.found.log_mean = weights.log_mean
