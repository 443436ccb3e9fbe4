"""Plans: which denoising steps are stochastic, and how much noise each gets.

A plan turns (number of steps, eta, iteration) into eta per step; 0 marks a deterministic step. Every sample of a
group gets the same plan, otherwise the spread of its rewards would measure the plan and not the policy.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor


class Plan(Protocol):
    """Base of plans: `etas` gives [T] noise levels for one iteration of training."""

    def etas(self, steps: int, eta: float, iteration: int, seed: int) -> Tensor: ...


@dataclass(frozen=True)
class All:
    """Every step but the last is stochastic (Flow-GRPO, DanceGRPO).

    Args:
        last: the last step is stochastic too, for kernels whose noise does not end with sigma (ReinFlow's). 'noise':
            it is, but nothing is learned from it, as in Flow-GRPO's code: its noise stays in the pictures.
    """

    last: bool | Literal["noise"] = False

    def etas(self, steps: int, eta: float, iteration: int, seed: int) -> Tensor:
        return torch.tensor([eta] * (steps - 1) + [eta if self.last else 0.0])

    @property
    def unlearned(self) -> int:
        """Number of the last stochastic steps that nothing is learned from."""
        return int(self.last == "noise")


@dataclass(frozen=True)
class Window:
    """`size` consecutive stochastic steps, ODE elsewhere (MixGRPO arXiv 2507.21802, Flow-GRPO-Fast).

    MixGRPO slides it progressively (size 4, every 25 iterations, 25 steps); MixGRPO-Flash* keeps it at the start.
    Flow-GRPO-Fast draws its place in the first half of the schedule every iteration (size 1 to 3). The authors'
    windows shrink to nothing at the end of the schedule; this one starts over once it touches it.

    Args:
        size: number of stochastic steps, at least 1.
        start: first step of the window, counted from 0.
        stop: the window stays below this step; default the last step, which never carries noise.
        order: 'fixed' stays at start; 'progressive' moves on every `every` iterations and starts over at the end;
            'random' draws a place every `every` iterations.
        every: iterations between two moves, at least 1.
        stride: steps a progressive move covers, at least 1.
        every_last: iterations a progressive window spends at its last place; from the first place to there they
            go linearly from `every` to this. Default `every`.
        of: scope of a random window, a whole iteration or each group by itself.
    """

    size: int = 2
    start: int = 0
    stop: int | None = None
    order: Literal["fixed", "progressive", "random"] = "fixed"
    every: int = 1
    stride: int = 1
    every_last: int | None = None
    of: Literal["iteration", "group"] = "iteration"

    def __post_init__(self) -> None:
        if self.of == "group" and self.order != "random":
            raise ValueError("window: of: group goes with order: random")
        if self.size < 1 or self.start < 0 or self.every < 1 or self.stride < 1:
            raise ValueError("window: size, every and stride must be at least 1 and start at least 0")
        if self.every_last is not None and (self.every_last < 1 or self.order != "progressive"):
            raise ValueError("window: every_last is at least 1 and goes with order: progressive")

    def etas(self, steps: int, eta: float, iteration: int, seed: int) -> Tensor:
        first = self._first(self.places(steps), iteration, seed)
        etas = torch.zeros(steps)
        etas[first : first + self.size] = eta
        return etas

    def places(self, steps: int) -> range:
        """The first steps the window can have."""
        stop = steps - 1 if self.stop is None else self.stop
        if stop > steps - 1 or self.start + self.size > stop:
            raise ValueError(
                f"window: {self.size} stochastic steps from step {self.start} do not fit below step "
                f"{min(stop, steps - 1)} of a {steps}-step schedule (its last step carries no noise)"
            )
        return range(self.start, stop - self.size + 1)

    def _first(self, places: range, iteration: int, seed: int) -> int:
        if self.order == "fixed":
            return self.start
        if self.order == "random":
            return places[int(np.random.default_rng([seed, iteration // self.every]).integers(len(places)))]
        stops = places[:: self.stride]
        last = self.every if self.every_last is None else self.every_last
        stays = np.linspace(self.every, last, len(stops)).astype(int)
        return stops[int(np.searchsorted(stays.cumsum(), iteration % stays.sum(), side="right"))]


@dataclass(frozen=True)
class Random:
    """`size` stochastic steps drawn from a range, ODE elsewhere (Flow-DPPO's code, arXiv 2606.11025: 3 of the first 5).

    Args:
        size: number of stochastic steps, at least 1.
        start: first step of the range, counted from 0.
        stop: the range ends below this step; default the last step, which never carries noise.
        every: iterations between two draws, at least 1.
        of: scope of the drawn steps, a whole iteration or each group by itself.
    """

    size: int = 3
    start: int = 0
    stop: int | None = None
    every: int = 1
    of: Literal["iteration", "group"] = "iteration"

    def __post_init__(self) -> None:
        if self.size < 1 or self.start < 0 or self.every < 1:
            raise ValueError("random: size and every must be at least 1 and start at least 0")

    def etas(self, steps: int, eta: float, iteration: int, seed: int) -> Tensor:
        stop = steps - 1 if self.stop is None else self.stop
        if stop > steps - 1 or self.start + self.size > stop:
            raise ValueError(
                f"random: {self.size} stochastic steps from step {self.start} do not fit below step "
                f"{min(stop, steps - 1)} of a {steps}-step schedule (its last step carries no noise)"
            )
        rng = np.random.default_rng([seed, iteration // self.every])
        etas = torch.zeros(steps)
        etas[rng.choice(np.arange(self.start, stop), self.size, replace=False)] = eta
        return etas


@dataclass(frozen=True)
class Single:
    """Exactly one stochastic step, ODE elsewhere, so that the reward is that step's (G2RPO, arXiv 2510.01982).

    Both papers branch at several steps of one deterministic trajectory: G2RPO at the first half of the schedule,
    TempFlow-GRPO (2508.04324) at every step but the last. `places` are those steps.

    Args:
        start: the first step it may be, counted from 0.
        stop: it stays below this step; default the last step, which never carries noise.
        order: 'random' draws the step, 'cyclic' takes each in turn.
        every: iterations between two changes, at least 1.
    """

    start: int = 0
    stop: int | None = None
    order: Literal["random", "cyclic"] = "random"
    every: int = 1

    @property
    def _window(self) -> Window:
        order: Literal["random", "progressive"] = "random" if self.order == "random" else "progressive"
        return Window(1, self.start, self.stop, order, self.every)

    def places(self, steps: int) -> range:
        """The steps it chooses from."""
        return self._window.places(steps)

    def etas(self, steps: int, eta: float, iteration: int, seed: int) -> Tensor:
        return self._window.etas(steps, eta, iteration, seed)


@dataclass(frozen=True)
class Decay:
    """Noise early, little late: eta falls by a cosine over the stochastic steps (HiCoGen, arXiv 2511.19965).

    eta_k = minimum + (eta - minimum) (1 + cos(pi k / (K - 1))) / 2 for the first K steps, no noise after them. The
    authors published no code and no minimum; their maximum, `eta`, is 1. A step's policy gradient grows as 1 / eta, so
    that with a small minimum the last noisy step drowns the first ones.

    Args:
        minimum: eta of the last stochastic step, at least 0 and at most eta.
        stop: K, the steps with noise, at least 1; default all but the last step.
    """

    minimum: float = 0.1
    stop: int | None = None

    def etas(self, steps: int, eta: float, iteration: int, seed: int) -> Tensor:
        if not 0 <= self.minimum <= eta:
            raise ValueError(f"decay: minimum is {self.minimum:g}; it must lie between 0 and eta, which is {eta:g}")
        stop = steps - 1 if self.stop is None else self.stop
        if not 1 <= stop < steps:
            raise ValueError(f"decay: stop is {stop}; of {steps} steps 1 to {steps - 1} carry noise, the last one none")
        share = (1 + torch.cos(torch.linspace(0, math.pi, stop))) / 2
        return torch.cat([self.minimum + (eta - self.minimum) * share, torch.zeros(steps - stop)])


@dataclass(kw_only=True)
class Calibrated:
    """An eta for each step, adapted from the dense rewards of that step (DenseGRPO, arXiv 2601.20218, algorithm 1).

    All steps start from `eta`. After an iteration, a step whose gains are balanced between positive and negative
    gets more noise, and one whose gains are mostly negative less. With `dance_sde` an eta is the paper's psi, with
    `flow_sde` it is psi over sqrt(s / (1 - s)).

    Departures: the printed rule raises when |positive - negative| < 2 and lowers otherwise, whatever the number of
    samples and the sign; fair coins pass that for 24 samples one time in six, so that noise falls even in
    perfect balance, and it falls too where noise helps. Here balance is a test at `z` standard deviations on the
    counts of the last iterations, and mostly positive gains raise. `literal` follows the print. The paper
    calibrates before training and then freezes (`updates`); the default goes on. The object has a state.

    Args:
        step: how much an update changes an eta.
        tolerance: difference of the counts that always passes for balance.
        z: standard deviations of the difference that pass for balance, at least 0.
        pool: iterations the counts remember (an exponential average), at least 1.
        minimum, maximum: bounds of every eta; maximum defaults to twice the start.
        updates: freeze after so many updates; default never.
        literal: the printed rule on one iteration's counts.
    """

    step: float = 0.01
    tolerance: float = 2.0
    z: float = 1.64
    pool: float = 4.0
    minimum: float = 0.02
    maximum: float | None = None
    updates: int | None = None
    literal: bool = False
    levels: list[float] = field(init=False, default_factory=list)
    counts: list[list[float]] = field(init=False, default_factory=list)
    """Two rows: positive and negative gains of each step."""
    done: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.step <= 0 or self.z < 0 or self.pool < 1 or self.minimum <= 0:
            raise ValueError("calibrated: step and minimum must be positive, z at least 0 and pool at least 1")

    def etas(self, steps: int, eta: float, iteration: int, seed: int) -> Tensor:
        if not self.levels:
            highest = 2 * eta if self.maximum is None else self.maximum
            if not self.minimum <= eta <= highest:
                raise ValueError(f"calibrated: eta is {eta:g}, outside its bounds {self.minimum:g} to {highest:g}")
            self.maximum = highest
            self.levels = [eta] * (steps - 1)
            self.counts = [[0.0] * (steps - 1), [0.0] * (steps - 1)]
        if len(self.levels) != steps - 1:
            raise ValueError(f"calibrated: these are the levels of {len(self.levels) + 1} steps, not of {steps}")
        return torch.tensor([*self.levels, 0.0])

    def update(self, dense: Tensor, mask: Tensor) -> None:
        """Learn from one iteration.

        Args:
            dense: [B, T] dense rewards of all processes.
            mask: [B, T] bool, the stochastic steps.
        """
        if self.updates is not None and self.done >= self.updates:
            return
        self.done += 1
        decay = 0.0 if self.literal else 1 - 1 / self.pool
        new = torch.stack([((sign * dense > 0) & mask).sum(0) for sign in (1, -1)])[:, :-1]
        counts = decay * torch.tensor(self.counts) + new.cpu()
        positive, negative = counts
        if self.literal:
            more = (positive - negative).abs() < self.tolerance
        else:
            more = positive - negative >= -(self.z * (positive + negative).sqrt()).clamp(min=self.tolerance)
        levels = torch.tensor(self.levels, dtype=torch.float64) + torch.where(more, self.step, -self.step)
        levels = levels.clamp(self.minimum, self.maximum)
        used = mask.any(0)[:-1].tolist()
        self.levels = [moved if on else old for moved, old, on in zip(levels.tolist(), self.levels, used)]
        self.counts = counts.tolist()

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: lists and numbers."""
        return {"levels": self.levels, "counts": self.counts, "maximum": self.maximum, "done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.levels, self.counts = list(state["levels"]), [list(row) for row in state["counts"]]
        self.maximum, self.done = state["maximum"], state["done"]


@dataclass(frozen=True)
class Tree:
    """A trajectory that branches: its samples share their path up to a split (BranchGRPO, arXiv 2509.06040).

    At step k of `splits` every sample takes the step `children` times, each with its own noise; the network sees
    a shared prefix once. Published: splits 0, 3, 6, 9 of 20 steps, two children, hence 16 leaves.

    Args:
        splits: steps that branch, counted from 0, increasing, below the last step.
        children: continuations at a split, at least 2.
        noise_scale: the noise at a split is this many times the kernel's, which scores it as its own (the authors'
            code: 4).
    """

    splits: list[int]
    children: int = 2
    noise_scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.splits or self.splits != sorted(set(self.splits)) or self.splits[0] < 0:
            raise ValueError(f"tree: splits must be increasing steps counted from 0, not {self.splits}")
        if self.children < 2:
            raise ValueError(f"tree: {self.children} children do not branch; at least 2 do")
        if self.noise_scale <= 0:
            raise ValueError(f"tree: noise_scale is {self.noise_scale:g}; it must be positive")

    def etas(self, steps: int, eta: float, iteration: int, seed: int) -> Tensor:
        if self.splits[-1] >= steps - 1:
            raise ValueError(
                f"tree: a split at step {self.splits[-1]} of a {steps}-step schedule has no noise to branch with; "
                f"its last stochastic step is {steps - 2}"
            )
        return All().etas(steps, eta, iteration, seed)

    @property
    def leaves(self) -> int:
        """Finished samples of one tree."""
        return self.children ** len(self.splits)

    def widths(self, steps: int) -> list[int]:
        """Samples at each of the T + 1 depths: the start noise, and what there is after each step."""
        return [self.children ** sum(k < depth for k in self.splits) for depth in range(steps + 1)]

    def forwards(self, steps: int) -> int:
        """Network evaluations of one tree; `leaves` trajectories apart from each other take leaves * steps."""
        return sum(self.widths(steps)[:-1])

    def nodes(self, steps: int) -> Tensor:
        """[leaves, T + 1] integers: the node a leaf's path is at, numbered within each depth from 0."""
        widths = torch.tensor(self.widths(steps))
        return torch.arange(self.leaves)[:, None] // (self.leaves // widths)

    def memory(self, steps: int, elements: int) -> int:
        """Bytes of one tree kept as `leaves` trajectories: float32 latents and velocities of `elements` each."""
        return self.leaves * (2 * steps + 1) * elements * 4


PLANS: dict[str, type] = {
    "all": All,
    "window": Window,
    "random": Random,
    "single": Single,
    "decay": Decay,
    "calibrated": Calibrated,
    "tree": Tree,
}
