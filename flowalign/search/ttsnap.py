"""TTSnap (arXiv 2511.22242): many samples are begun, and those that promise little are not finished.

The authors prune by the reward distilled to what states promise, which `flowalign train-reward --noisy` trains and
`noisy` names; without it the reward itself judges those blurred pictures. Published: 0.4, 0.4 and 0.5 are kept at steps
2, 6 and 11 of 20.
"""

from dataclasses import dataclass, field

from flowalign.search.engine import Engine
from flowalign.search.noisy import NoisyReward


@dataclass(frozen=True, kw_only=True)
class TTSnap:
    """Many samples are begun, and those whose predicted x0 scores low are not finished (TTSnap, arXiv 2511.22242).

    Args:
        starts: samples begun; default as many as the budget pays for.
        at: where samples are pruned, as shares of the schedule, increasing.
        keep: the share that goes on each time, or a list of the shares.
        noisy: folder of a reward of noisy states, which prunes in the place of the reward that is searched for.
    """

    name = "ttsnap"
    starts: int | None = None
    at: list[float] = field(default_factory=lambda: [0.2, 0.4, 0.6])
    keep: float | list[float] = 0.5
    noisy: str | None = None

    def __post_init__(self) -> None:
        if self.at != sorted(set(self.at)) or not all(0 <= share < 1 for share in self.at):
            raise ValueError(f"at {self.at} increases from 0 to below 1")
        if len(self.kept) != len(self.at) or not all(0 < share <= 1 for share in self.kept):
            raise ValueError(f"keep {self.keep} is a share above 0, or one for each of {self.at}")

    @property
    def kept(self) -> list[float]:
        """The share that goes on, of each time."""
        return self.keep if isinstance(self.keep, list) else [self.keep] * len(self.at)

    def sizes(self, starts: int, steps: int) -> list[int]:
        """Samples whose velocity each step asks for, and in the end those that are finished."""
        cuts = {int(at * steps): size for at, size in zip(self.at, self.kept, strict=True)}
        sizes = [starts]
        for k in range(steps):
            sizes.append(max(1, round(cuts[k] * sizes[-1])) if k in cuts else sizes[-1])
        return sizes

    def cost(self, starts: int, steps: int) -> tuple[int, int]:
        sizes = self.sizes(starts, steps)
        cut = [before for before, after in zip(sizes, sizes[1:], strict=False) if after < before]
        return sum(sizes[:-1]), sum(cut) + sizes[-1]

    def __call__(self, engine: Engine) -> None:
        starts = engine.afford(lambda n: self.cost(n, engine.steps), self.starts)
        p, noisy = engine.start(starts), None if self.noisy is None else NoisyReward(self.noisy)
        for left in self.sizes(starts, engine.steps)[1:]:
            v = engine.velocity(p.x, p.step)
            if left < len(p):
                judge = None if noisy is None else noisy.at(float(engine.sigmas[p.step[0]]))
                p = engine.score(p, engine.x0(p, v), judge)
                rows = p.score.topk(left).indices
                p, v = engine.keep(p, rows), v[rows.to(v.device)]
            p = engine.step(p, v)
        engine.score(p)
