"""EvoSearch (arXiv 2505.17618): a population of samples whose best are changed a little and sampled again.

First their start noise is changed, later their states on the way, from where less is left to sample. Every sample that
went through a step is a possible parent there.

Departures: samples follow the ODE, so that the first is the plain one, where the authors use a stochastic solver; a
child leaves its parent's way by one step of the kernel, whose drift makes up for the noise, where theirs adds noise of
the same size alone; their elite of 3, which they sample again in each generation, is not, since its samples would be
the same. The authors' example is a population of 14, later 7 with the elite, and steps 5, 20, 30, 40 of 50.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowalign import registry
from flowalign.search.engine import Engine, Particles
from samplers import Trajectory, check_eta, normal
from samplers.completion import perturb
from samplers.rows import Rows


def mutated(start: Tensor, noise: Tensor, rate: float) -> Tensor:
    """Start noises, a share of them replaced by fresh noise: the variance stays 1."""
    return math.sqrt(1 - rate**2) * start + rate * noise


@dataclass
class Population(Rows):
    """N finished samples and how they got there."""

    trajectory: Trajectory
    ends: Particles


@dataclass(frozen=True, kw_only=True)
class EvoSearch:
    """The best of a population are changed a little, in their start noise or on the way (EvoSearch, arXiv 2505.17618).

    Args:
        population: samples of the first generation; default as many as the budget pays for.
        offspring: size of each later generation, as a share of the first.
        at: where each generation changes its parents, as shares of the schedule, in order; 0 is the start noise.
        tournament: share of the samples so far that compete to be a child's parent.
        mutation: how much of the start noise is replaced, in [0, 1].
        kernel, eta: of the one noisy step by which a child leaves its parent's way.
    """

    name = "evosearch"
    population: int | None = None
    at: list[float] = field(default_factory=lambda: [0.0, 0.2, 0.4, 0.6])
    offspring: float = 0.5
    tournament: float = 0.9
    mutation: float = 0.2
    kernel: str = "cps"
    eta: float = 0.7

    def __post_init__(self) -> None:
        check_eta(registry.resolve("kernels", self.kernel, "kernel"), self.eta)
        if self.at != sorted(self.at) or not all(0 <= share < 1 for share in self.at):
            raise ValueError(f"at {self.at} must be shares of the schedule in order, from 0 to below 1")
        if not 0 <= self.mutation <= 1 or not 0 < self.tournament <= 1 or self.offspring < 0:
            raise ValueError(
                f"mutation {self.mutation:g} is from 0 to 1, tournament {self.tournament:g} a share above 0, and "
                f"offspring {self.offspring:g} at least 0"
            )

    def children(self, size: int) -> int:
        """Number of children of each generation; a population of one has none."""
        return int(self.offspring * size)

    def steps(self, steps: int) -> list[int]:
        """First step of each generation; the last step has no noise."""
        return [k for share in self.at if (k := int(share * steps)) < steps - 1 or k == 0]

    def cost(self, size: int, steps: int) -> tuple[int, int]:
        children = self.children(size)
        begun = [steps - k - (k > 0) for k in self.steps(steps)]
        return size * steps + children * sum(begun), size + children * len(begun)

    def __call__(self, engine: Engine) -> None:
        size = engine.afford(lambda n: self.cost(n, engine.steps), self.population)
        children = self.children(size)
        if not children:
            size = engine.afford(lambda n: (n * engine.steps, n), self.population)
        start = engine.start(size)
        everyone = self.sampled(engine, engine.trajectories(start.x), start.step, start.node)
        for generation, k in enumerate(self.steps(engine.steps) if children else ()):
            parents = self.parents(engine, everyone, children)
            branches, first = self.changed(engine, everyone.trajectory, parents, k, generation)
            offspring = self.sampled(engine, branches, first, everyone.ends.node[parents])
            everyone = Population.cat([everyone, offspring])

    def sampled(self, engine: Engine, branches: Trajectory, first: Tensor, node: Tensor) -> Population:
        """Trajectories brought to their ends and scored."""
        whole = engine.walk(branches, first)
        end = torch.full_like(first, engine.steps)
        return Population(whole, engine.score(engine.particles(whole.final, end, node)))

    def parents(self, engine: Engine, everyone: Population, children: int) -> Tensor:
        """[children] the winners of as many tournaments."""
        among = max(1, int(self.tournament * len(everyone.ends)))
        drawn = [torch.randperm(len(everyone.ends), generator=engine.random)[:among] for _ in range(children)]
        return torch.stack([rows[everyone.ends.score[rows].argmax()] for rows in drawn])

    def changed(
        self, engine: Engine, trunk: Trajectory, parents: Tensor, k: int, generation: int
    ) -> tuple[Trajectory, Tensor]:
        """Children of these parents at step k, and [N] the steps from which they are still to be sampled."""
        rows, sources = parents.to(trunk.latents.device), engine.noise(len(parents), generation)
        if k == 0:
            start = trunk.latents[rows, 0]
            x = mutated(start, normal(start.shape[1:], sources, start.device), self.mutation)
            return engine.trajectories(x), torch.zeros_like(rows)
        at, eta = torch.full_like(rows, k), torch.full(rows.shape, self.eta, device=rows.device)
        seeds = [source.initial_seed() for source in sources]
        kernel = registry.resolve("kernels", self.kernel, "kernel")
        return perturb(trunk, kernel, rows, at, eta, seeds), at + 1
