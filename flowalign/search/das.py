"""DAS (arXiv 2501.05803): particles drift towards the reward, and their weights make up for it.

A particle's next state is drawn from the kernel with its mean moved by variance * lambda_{t+1} * strength * gradient of
the reward of the predicted x0. Its twist is exp(lambda_t * strength * that reward), and lambda_t rises to 1:
(1 + gamma)^t - 1. Its weight is multiplied by the kernel's density over the draw's, and by the change of the twist.

Departures: after a resampling a particle has its own gradient and twist, in the authors' code the ones of the particle
that was there before; a comb in the place of their 'ssp', which draws each particle as often, rounded up or down; by
default gamma is such that lambda is 1 in the last step, where the authors set 0.008 and jump. Published: 4 particles,
50 steps of DDIM with eta 1, and a strength, their 1 / kl_coeff, of 200 for aesthetic, 100 for CLIP and 10000 for
PickScore.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from flowalign import registry
from flowalign.search.engine import Engine
from flowalign.search.weights import ParticleWeights
from samplers import All, check_eta, normal, transition


@dataclass(frozen=True, kw_only=True)
class DAS:
    """Particles drift towards a differentiable reward, weights make up for it (DAS, arXiv 2501.05803).

    Args:
        particles: default as many as the budget pays for.
        strength: strength of the tilt exp(strength * reward); 0 samples plainly.
        gamma: how fast the reward comes in; default so that it is whole in the last step.
        below: share of the particles; resampled is where the effective sample size is smaller.
        kernel, eta: of the steps.
    """

    name = "das"
    gradients: ClassVar[bool] = True
    particles: int | None = None
    strength: float = 100.0
    gamma: float | None = None
    below: float = 0.5
    kernel: str = "cps"
    eta: float = 0.7

    def __post_init__(self) -> None:
        check_eta(registry.resolve("kernels", self.kernel, "kernel"), self.eta)

    def tempering(self, steps: int) -> list[float]:
        """lambda of each of the T states that the network sees, and 1 of the finished one."""
        gamma = 2 ** (1 / max(1, steps - 1)) - 1 if self.gamma is None else self.gamma
        return [min((1 + gamma) ** k - 1, 1.0) for k in range(steps)] + [1.0]

    def __call__(self, engine: Engine) -> None:
        n = engine.afford(lambda n: (3 * n * engine.steps, n * (1 + engine.steps)), self.particles)
        kernel = registry.resolve("kernels", self.kernel, "kernel")
        eta, tempering = All().etas(engine.steps, self.eta, 0, 0), self.tempering(engine.steps)
        p, sources, weights = engine.start(n), engine.noise(n), ParticleWeights(n)
        twist, ratio = torch.zeros(n), torch.zeros(n)
        for k in range(engine.steps):
            v, reward, slope = engine.slope(p)
            p = engine.note(p, reward)
            before, twist = twist, tempering[k] * self.strength * p.score
            weights.add(ratio + twist - before)
            gradient = tempering[k + 1] * self.strength * slope
            rows = weights.resample(self.below, engine.random)
            if rows is not None:
                moved = rows.to(v.device)
                p, twist, v, gradient = engine.keep(p, rows), twist[rows], v[moved], gradient[moved]
            sigma, to = engine.sigmas[p.step], engine.sigmas[p.step + 1]
            step = transition(kernel, p.x, v, sigma, to, eta[k].expand(n).to(v.device))
            noise = normal(v.shape[1:], sources, v.device) if eta[k] > 0 else torch.zeros_like(v)
            drift = step.std * gradient
            ratio = -(drift.square() / 2 + drift * noise).flatten(1).sum(1).cpu()
            p = p.replace(x=step.mean + step.std * (drift + noise), step=p.step + 1)
        p = engine.score(p)
        weights.add(ratio + self.strength * p.score - twist)
        engine.found.log_mean = weights.log_mean
