"""What every search is made of: particles of one prompt that are moved down the schedule, scored, and remembered."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, cast, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flowalign.errors import ConfigError
from flowalign.policies.diffusion import DiffusersPolicy, Rollout
from flowalign.policies.settings import Sampling
from flowalign.search.found import Node, SearchResult
from rewards import Reward, score
from rewards.gradients import score_with_gradient
from samplers import Kernel, Trajectory, derive_seed, generators, normal, ode, transition
from samplers.completion import complete, path
from samplers.rows import Rows

Cost = Callable[[int], tuple[int, int]]
"""size -> (velocities computed, samples scored)."""
Kind = Literal["forwards", "reward_calls", "samples"]


@dataclass(frozen=True)
class Budget:
    """Limit of one prompt's search."""

    kind: Kind
    """forwards: network evaluations, each branch of guidance one. samples: as many forwards as they take plainly."""
    amount: int

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """Read 'forwards=2000'."""
        kind, _, amount = text.partition("=")
        if kind not in get_args(Kind) or not amount.isdecimal() or int(amount) < 1:
            raise ConfigError(f"--budget {text}: give forwards=2000, reward_calls=100 or samples=50, of each prompt")
        return cls(cast(Kind, kind), int(amount))

    def __str__(self) -> str:
        return f"{self.kind}={self.amount}"


DEFAULT = Budget("samples", 16)


@dataclass(kw_only=True)
class Particles(Rows):
    """N states on their way, each at its own step of the schedule."""

    x: Tensor
    """[N, ...] float32"""
    step: Tensor
    """[N] number of the step, from 0, the start noise, to T, the finished sample."""
    node: Tensor
    """[N] number of the node it came from, -1 for none."""
    score: Tensor
    """[N] last score of it, or of the x0 predicted from it; NaN before."""

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return replace(self, **changes)


class Engine:
    """The search of one prompt.

    Args:
        policy: the frozen model.
        reward: reward of single samples to search for.
        metadata: metadata of the prompt; names the pictures that samples are made from.
        seed: seed of the first start noise; the n-th has seed + n, as plain sampling of n samples has.
        report: called whenever samples were scored.
    """

    def __init__(
        self,
        policy: DiffusersPolicy,
        reward: Reward,
        prompt: str,
        sampling: Sampling,
        *,
        seed: int = 0,
        budget: Budget = DEFAULT,
        metadata: Mapping[str, Any] | None = None,
        method: str = "",
        report: Callable[[SearchResult], None] = lambda found: None,
    ) -> None:
        self.policy, self.reward, self.prompt, self.seed, self.report = policy, reward, prompt, seed, report
        self.sampling = sampling
        if policy.family.samples_sound:
            raise ConfigError(
                f"{type(policy.pipeline).__name__} denoises a sound along with the pictures, which a search loses; "
                "flowalign sample works"
            )
        if policy.family.makes_sound:
            raise ConfigError(
                f"{type(policy.pipeline).__name__} makes sounds, and a search shows pictures; flowalign sample works"
            )
        if sampling.chunks > 1:
            raise ConfigError("chunks: a search goes on from states of samples that are made as a whole; 1 works")
        # Euler's steps are what all methods can take
        self.metadata, self.arguments = dict(metadata or {}), sampling.arguments() | {"order": 1}
        self.batch_size: int = self.arguments["batch_size"]
        self.started = 0
        """Start noises so far."""
        self.random = torch.Generator().manual_seed(derive_seed(seed, 1))
        """Generator of all random choices."""
        self.rollout = self._dry(1)
        self.sigmas = self.rollout.trajectory.sigmas
        self.steps = len(self.sigmas) - 1
        """T"""
        self.found = SearchResult(prompt=prompt, method=method, steps=self.steps)
        self.best: Tensor | None = None
        """[...] latents of the best finished sample"""
        self.unit = self.rollout.conditions.branches * sampling.networks
        """Forwards of one velocity."""
        calls = budget.kind == "reward_calls"
        whole = self.steps * self.unit if budget.kind == "samples" else 1
        self.budget = budget
        self.limits = (None, budget.amount) if calls else (budget.amount * whole, None)
        """Limits of forwards and of reward calls."""

    def _dry(self, count: int) -> Rollout:
        seeds = range(self.seed + self.started, self.seed + self.started + count)
        records = [self.metadata] * count
        return self.policy.sample([self.prompt] * count, seeds, metadata=records, dry=True, **self.arguments)

    def beside(
        self, policy: DiffusersPolicy, prompt: str, metadata: Mapping[str, Any], changes: Mapping[str, Any]
    ) -> "Engine":
        """An engine of another model or prompt that shares this one's budget and what is found.

        Args:
            changes: changed settings of the sampling.
        """
        sampling = self.sampling.model_copy(update=changes)
        other = Engine(
            policy,
            self.reward,
            prompt,
            sampling,
            seed=self.seed,
            budget=self.budget,
            metadata=metadata,
            report=self.report,
        )
        other.found, other.limits = self.found, self.limits
        return other

    def fits(self, velocities: int, calls: int) -> bool:
        """Whether the rest of the budget pays for so many velocities of single states and samples scored."""
        forwards, scored = self.limits
        enough = forwards is None or self.found.forwards + velocities * self.unit <= forwards
        return enough and (scored is None or self.found.reward_calls + calls <= scored)

    def afford(self, cost: Cost, wanted: int | None = None) -> int:
        """The largest size, up to `wanted`, that the rest of the budget pays for.

        Raises:
            ConfigError: not even a size of 1.
        """
        if not self.fits(*cost(1)):
            needed = cost(1)[0] * self.unit
            raise ConfigError(
                f"budget {self.budget} is smaller than one sample, which takes {needed} forwards here and "
                f"{cost(1)[1]} reward calls"
            )
        low, high = 1, 2
        while self.fits(*cost(high)) and (wanted is None or low < wanted):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(*cost(middle)) else (low, middle)
        return low if wanted is None else min(low, wanted)

    def start(self, count: int) -> Particles:
        """The next `count` start noises."""
        drawn, moved = self._dry(count), self.policy.start_noise
        x = drawn.trajectory.latents[:, 0] if moved is None else moved(drawn)
        self.started += count
        return self.particles(x, torch.zeros(count, dtype=torch.long))

    def particles(self, x: Tensor, step: Tensor, node: Tensor | None = None) -> Particles:
        """States [N, ...] at steps [N], which came from these nodes [N]."""
        step = step.to(x.device)
        nowhere = torch.full_like(step, -1)
        return Particles(
            x=x, step=step, node=nowhere if node is None else node, score=torch.full(step.shape, torch.nan)
        )

    def velocity(self, x: Tensor, step: Tensor) -> Tensor:
        """[N, ...] guided velocities at states [N, ...]; different steps [N] share network batches."""
        # a backward pass costs about two forward ones
        self.found.forwards += len(x) * self.unit * (3 if x.requires_grad else 1)
        return torch.cat([self._velocity(*pair) for pair in zip(x.split(self.batch_size), step.split(self.batch_size))])

    def _velocity(self, x: Tensor, step: Tensor) -> Tensor:
        def evaluate(x: Tensor) -> Tensor:
            return self.policy.velocity(self.rollout, torch.zeros_like(step), step, x).float()

        if not x.requires_grad:
            return evaluate(x)
        # what the network computes is not kept, but computed again in the backward pass
        velocity: Tensor = checkpoint(evaluate, x, use_reentrant=False, preserve_rng_state=False)
        return velocity

    def x0(self, p: Particles, velocity: Tensor) -> Tensor:
        """[N, ...] finished samples that a straight line leads to."""
        return p.x - self._each(self.sigmas[p.step], p.x) * velocity

    def step(
        self,
        p: Particles,
        velocity: Tensor,
        kernel: Kernel = ode,
        eta: Tensor | None = None,
        sources: Sequence[torch.Generator] = (),
    ) -> Particles:
        """The particles one step on.

        Args:
            eta: [T] noise levels of the schedule's steps; None walks the ODE.
            sources: N generators of the step noise.
        """
        at = p.step.cpu()
        levels = torch.zeros(len(at)) if eta is None else eta[at]
        noise = normal(p.x.shape[1:], sources, p.x.device) if eta is not None and bool(levels.any()) else None
        to, here = self.sigmas[p.step + 1], self.sigmas[p.step]
        moved = transition(kernel, p.x, velocity, here, to, levels.to(p.x.device), noise=noise)
        return p.replace(x=moved.next, step=p.step + 1)

    def finish(self, p: Particles, velocity: Tensor | None = None) -> Particles:
        """The particles at the end of the ODE.

        Args:
            velocity: [N, ...] at the states, where it is known.
        """

        def evaluate(x: Tensor, _: Tensor, step: Tensor) -> Tensor:
            return self.velocity(x, step)

        paths = [path(first, self.steps) for first in p.step.tolist()]
        rows = torch.arange(len(p), device=p.x.device)
        x = complete(evaluate, p.x, rows, paths, self.sigmas, velocity, self.batch_size)
        return p.replace(x=x, step=torch.full_like(p.step, self.steps))

    def walk(self, branches: Trajectory, first: Tensor) -> Trajectory:
        """Fill in what follows the states at steps `first` [N] of trajectories, by the ODE."""
        latents, velocity = branches.latents.clone(), branches.velocity.clone()
        for leap in range(self.steps - int(first.min())):
            rows = (first + leap < self.steps).nonzero().squeeze(1)
            at = first[rows] + leap
            velocity[rows, at] = self.velocity(latents[rows, at], at)
            dt = self._each(self.sigmas[at + 1] - self.sigmas[at], latents[rows, at])
            latents[rows, at + 1] = latents[rows, at] + velocity[rows, at] * dt
        return replace(branches, latents=latents, velocity=velocity)

    def trajectories(self, x: Tensor) -> Trajectory:
        """Trajectories from start noises [N, ...], of which nothing else is filled in."""
        count, zeros = len(x), x.new_zeros(len(x), self.steps)
        latents = torch.cat([x[:, None], x.new_zeros(count, self.steps, *x.shape[1:])], 1)
        return Trajectory(
            latents=latents, velocity=torch.zeros_like(latents[:, 1:]), log_prob=zeros, eta=zeros, sigmas=self.sigmas
        )

    def noise(self, count: int, *key: int) -> list[torch.Generator]:
        """Generators of step noise, each a seed of its own."""
        return generators([derive_seed(self.seed, 2, *key, n) for n in range(count)])

    @staticmethod
    def _each(values: Tensor, like: Tensor) -> Tensor:
        return values.view(-1, *[1] * (like.dim() - 1))

    @torch.no_grad()
    def score(self, p: Particles, x0: Tensor | None = None, reward: Reward | None = None) -> Particles:
        """The particles with their scores, each a node of what was tried.

        Args:
            x0: [N, ...] what to score in the place of states that are not finished.
            reward: reward that judges it; default the engine's.

        Raises:
            RewardError: as `rewards.score`.
        """
        x0, scored = p.x if x0 is None else x0, []
        # pictures are large: only so many are held at once
        for rows in torch.arange(len(p)).split(self.batch_size):
            samples = self.samples(x0[rows.to(x0.device)])
            records = [dict(self.metadata) for _ in samples]
            values = score(reward or self.reward, samples, [self.prompt] * len(rows), records).value
            scored.append(self.note(p[rows], values, samples))
        return Particles.cat(scored)

    def samples(self, latents: Tensor) -> list[Any]:
        """Pictures or videos of finished latents [N, ...]."""
        whole = self.rollout.whole(latents, torch.zeros(len(latents), dtype=torch.long, device=latents.device))
        return self.policy.decode_latents(whole, self.batch_size)

    def note(self, p: Particles, values: Tensor, samples: Sequence[Any] = ()) -> Particles:
        """Remember what particles scored [N], and the samples of finished ones."""
        self.found.reward_calls += len(p)
        numbers = []
        rows = zip(p.node.tolist(), p.step.tolist(), values.tolist(), samples or [None] * len(p), strict=True)
        for parent, step, value, sample in rows:
            node = Node(parent=parent if parent >= 0 else None, step=step, score=value, forwards=self.found.forwards)
            numbers.append(self.found.add(node, sample))
        if self.found.best is not None and self.found.best.node in numbers:
            self.best = p.x[numbers.index(self.found.best.node)].detach().clone()
        self.report(self.found)
        return p.replace(node=torch.tensor(numbers), score=values)

    def pixels(self, latents: Tensor) -> Tensor:
        """[N, 3, H, W] pictures, or [N, 3, F, H, W] videos, in [0, 1] of finished latents, with gradients."""
        whole = self.rollout.whole(latents, torch.zeros(len(latents), dtype=torch.long, device=latents.device))
        return self.policy.decode_pixels(whole)

    def value(self, latents: Tensor) -> Tensor:
        """[N] rewards of finished latents, with gradients; they are not noted."""
        texts, records = [self.prompt] * len(latents), [self.metadata] * len(latents)
        return score_with_gradient(self.reward, self.pixels(latents), texts, records).value.to(latents.device)

    def slope(self, p: Particles) -> tuple[Tensor, Tensor, Tensor]:
        """Velocities [N, ...], rewards [N] of the x0 that they predict, and the gradients of those to the states."""
        with torch.enable_grad():
            x = p.x.detach().requires_grad_()
            v = self.velocity(x, p.step)
            reward = self.value(self.x0(p.replace(x=x), v))
            [slope] = torch.autograd.grad(reward.sum(), x)
        return v.detach(), reward.detach().cpu(), slope

    def keep(self, p: Particles, rows: Tensor) -> Particles:
        """Some of the particles, [M] indices, one perhaps several times; the nodes of the others are pruned."""
        for node in set(p.node.tolist()) - set(p.node[rows.cpu()].tolist()):
            self.found.nodes[node].kept = False
        moved = rows.to(p.x.device)
        return Particles(x=p.x[moved], step=p.step[moved], node=p.node[rows.cpu()], score=p.score[rows.cpu()])
