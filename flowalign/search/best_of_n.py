"""Best of n: plain samples, of which the best is taken."""

from dataclasses import dataclass

from flowalign.search.engine import Engine


@dataclass(frozen=True)
class BestOfN:
    """Plain samples from as many start noises as the budget pays for, of which the best is taken.

    Args:
        n: samples, at least 1; default as many as the budget pays for.
    """

    name = "best_of_n"
    n: int | None = None

    def __post_init__(self) -> None:
        if self.n is not None and self.n < 1:
            raise ValueError(f"n is {self.n}; it is at least 1")

    def __call__(self, engine: Engine) -> None:
        left = engine.afford(lambda n: (n * engine.steps, n), self.n)
        while left:
            count = min(left, engine.batch_size)
            engine.score(engine.finish(engine.start(count)))
            left -= count
