"""TTSnap (arXiv 2511.22242): many samples are begun, and those that promise little are not finished.

Departure: the reward itself judges the x0 that a state promises; the authors distil it to such blurred pictures first.
"""

from dataclasses import dataclass, field

from flowalign.search.engine import Engine


@dataclass(frozen=True)
class TTSnap:
    """Many samples are begun, and those whose predicted x0 scores low are not finished (TTSnap, arXiv 2511.22242).

    Args:
        starts: samples begun; default as many as the budget pays for.
        at: where samples are pruned, as shares of the schedule, increasing.
        keep: the share that goes on each time.
    """

    starts: int | None = None
    at: list[float] = field(default_factory=lambda: [0.2, 0.4, 0.6])
    keep: float = 0.5

    def __post_init__(self) -> None:
        if self.at != sorted(set(self.at)) or not all(0 <= share < 1 for share in self.at) or not 0 < self.keep <= 1:
            raise ValueError(f"at {self.at} increases from 0 to below 1, and keep {self.keep:g} is a share above 0")

    def sizes(self, starts: int, steps: int) -> list[int]:
        """Samples whose velocity each step asks for, and in the end those that are finished."""
        cuts = {int(share * steps) for share in self.at}
        sizes = [starts]
        for k in range(steps):
            sizes.append(max(1, round(self.keep * sizes[-1])) if k in cuts else sizes[-1])
        return sizes

    def cost(self, starts: int, steps: int) -> tuple[int, int]:
        sizes = self.sizes(starts, steps)
        cut = [before for before, after in zip(sizes, sizes[1:], strict=False) if after < before]
        return sum(sizes[:-1]), sum(cut) + sizes[-1]

    def __call__(self, engine: Engine) -> None:
        starts = engine.afford(lambda n: self.cost(n, engine.steps), self.starts)
        p = engine.start(starts)
        for left in self.sizes(starts, engine.steps)[1:]:
            v = engine.velocity(p.x, p.step)
            if left < len(p):
                p = engine.score(p, engine.x0(p, v))
                rows = p.score.topk(left).indices
                p, v = engine.keep(p, rows), v[rows.to(v.device)]
            p = engine.step(p, v)
        engine.score(p)
