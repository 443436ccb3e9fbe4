"""DNO (arXiv 2405.18881): all noises of one sample, improved along the gradient of its reward.

Where the reward has no gradient, samples of noises nearby tell how the finished picture should change, and only the
generator's own gradient is asked for.

Published: 100 iterations (50 without a gradient), AdamW with learning rate 0.01 and torch's weight decay, gradients of
norm 1 at most, 50 steps of DDIM with eta 1, and 0.01 as how far nearby is.
Departure: differences are of the latents, where the authors' are of decoded pixels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowalign import registry
from flowalign.search.engine import Engine
from flowalign.search.optimizing import optimize
from samplers import All, check_eta, normal, transition


def improbability(noise: Tensor, block: int = 16, permutations: int = 10) -> Tensor:
    """Improbability of [d] as a standard normal, by the mean and the covariance of blocks of its elements.

    The negative logarithms of two concentration bounds, of the elements in their order and, on average, in random ones.
    """

    def bound(values: Tensor) -> Tensor:
        rows = values[: len(values) // block * block].view(-1, block)
        count = len(rows)
        mean, covariance = rows.mean(0), rows.T @ rows / count
        off = torch.linalg.matrix_norm(covariance - torch.eye(block, device=rows.device), ord=2)
        excess = ((1 + off).sqrt() - 1 - (block / count) ** 0.5).clamp(min=0)
        logs = torch.stack([-count * mean.square().sum() / (2 * block), -count * excess**2 / 2])
        return -logs.clamp(max=-float(torch.tensor(2.0).log())).sum()

    random = [bound(noise[torch.randperm(len(noise), device=noise.device)]) for _ in range(permutations)]
    return bound(noise) + (torch.stack(random).mean() if random else 0.0)


@dataclass(frozen=True, kw_only=True)
class DNO:
    """All noises of one sample, improved along the gradient of its reward or of an estimate (DNO, arXiv 2405.18881).

    Args:
        iterations: default as many as the budget pays for.
        nearby: samples by which the gradient of a reward without one is estimated; 0 takes the reward's own.
        distance: how far their noises are, in standard deviations.
        learning_rate: learning rate of AdamW.
        clip: largest norm of a gradient.
        regularization: weight of the noises' improbability, beside the reward.
        kernel, eta: of the steps; eta 0 walks the ODE and leaves the start noise alone to improve.
    """

    name = "dno"
    iterations: int | None = None
    nearby: int = 0
    distance: float = 0.01
    learning_rate: float = 0.01
    clip: float = 1.0
    regularization: float = 0.0
    kernel: str = "cps"
    eta: float = 0.7

    def __post_init__(self) -> None:
        check_eta(registry.resolve("kernels", self.kernel, "kernel"), self.eta)
        if self.nearby < 0:
            raise ValueError(f"nearby is {self.nearby}; it is at least 0")

    @property
    def gradients(self) -> bool:
        """Whether the reward must have one."""
        return self.nearby == 0

    def __call__(self, engine: Engine) -> None:
        each = 3 + self.nearby
        count = engine.afford(
            lambda n: ((each * (n - 1) + 1) * engine.steps, n + self.nearby * (n - 1)), self.iterations
        )
        start = engine.start(1).x
        sources = engine.noise(1)
        # the noise of the start, and of each step that adds noise: [T + 1, ...], or [1, ...]
        steps = engine.steps if self.eta > 0 else 0
        drawn = [normal(start.shape[1:], sources, start.device) for _ in range(steps)]
        noises = torch.cat([start, *drawn])
        optimizer = torch.optim.AdamW([noises], self.learning_rate)

        def generate() -> Tensor:
            return self.sampled(engine, noises[None])

        def loss(x: Tensor, score: float) -> Tensor:
            cost = self.estimated(engine, noises.detach(), x, score) if self.nearby else -engine.value(x).sum()
            return cost + self.regularization * improbability(noises.flatten()) if self.regularization else cost

        optimize(engine, [noises], optimizer, generate, loss, count, self.clip)

    def sampled(self, engine: Engine, noises: Tensor) -> Tensor:
        """[N, ...] finished samples of noises [N, T + 1, ...], or of start noises [N, 1, ...] along the ODE."""
        kernel = registry.resolve("kernels", self.kernel, "kernel")
        eta, x = All().etas(engine.steps, self.eta, 0, 0).to(noises.device), noises[:, 0]
        for k in range(engine.steps):
            step = torch.full((len(x),), k, device=x.device)
            sigma, to = engine.sigmas[step], engine.sigmas[step + 1]
            v = engine.velocity(x, step)
            noise = noises[:, k + 1] if self.eta > 0 else None
            x = transition(kernel, x, v, sigma, to, eta[step], noise=noise).next
        return x

    @torch.no_grad()
    def estimated(self, engine: Engine, noises: Tensor, x: Tensor, score: float) -> Tensor:
        """A loss whose gradient to the sample x [1, ...] is the reward's, estimated from samples nearby."""
        generator = engine.random
        moves = torch.randn(self.nearby, *noises.shape, generator=generator).to(noises.device)
        near = self.sampled(engine, noises + self.distance * moves)
        p = engine.score(engine.particles(near, torch.full((self.nearby,), engine.steps)))
        better = (p.score - score).to(near.device).view(-1, *[1] * (near.dim() - 1))
        slope = (better * (near - x)).mean(0)
        slope = slope / (slope.norm() + 1e-3)
        with torch.enable_grad():
            return -(slope * x).sum()
