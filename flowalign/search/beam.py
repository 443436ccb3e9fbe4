"""Beam search over the noises of each step, by the reward of the x0 that a state promises."""

from dataclasses import dataclass

from flowalign import registry
from flowalign.search.engine import Engine
from samplers import All, check_eta


@dataclass(frozen=True, kw_only=True)
class Beam:
    """A beam over the noises of each step: of every state several continuations are tried, and the best are kept.

    Args:
        width: states that are looked at in each step; default as many as the budget pays for.
        children: continuations of a state that is kept; width / children are kept.
        kernel, eta: of the steps, which need noise to be different.
    """

    name = "beam"
    width: int | None = None
    children: int = 4
    kernel: str = "cps"
    eta: float = 0.7

    def __post_init__(self) -> None:
        check_eta(registry.resolve("kernels", self.kernel, "kernel"), self.eta)
        if self.children < 2:
            raise ValueError(f"{self.children} children are no choice; at least 2 are")

    def __call__(self, engine: Engine) -> None:
        width = engine.afford(lambda n: (n * engine.steps, n * (engine.steps + 1)), self.width)
        survivors = -(-width // self.children)
        kernel = registry.resolve("kernels", self.kernel, "kernel")
        eta = All().etas(engine.steps, self.eta, 0, 0)
        p, sources = engine.start(width), engine.noise(width)
        for k in range(engine.steps):
            v = engine.velocity(p.x, p.step)
            if width > 1:
                p = engine.score(p, engine.x0(p, v))
                best = p.score.topk(survivors).indices
                # continuations of a step without noise would all be the same
                rows = best.repeat(self.children)[:width] if eta[k] > 0 else best
                p, v = engine.keep(p, rows), v[rows.to(v.device)]
            p = engine.step(p, v, kernel, eta, sources[: len(p)])
        engine.score(p)
