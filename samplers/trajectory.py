"""What one rollout of a batch went through, and the recorder that walks it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

import torch
from torch import Tensor

from samplers.kernels import Kernel, Transition, transition
from samplers.noise import generators, normal
from samplers.rows import SHARED, Rows, distinct_rows
from samplers.solvers import DPMSolver
from samplers.stored import Allocate, Stored


@dataclass(kw_only=True)
class Trajectory(Rows):
    """B samples of T steps, float32.

    A causal video is made in chunks of its frames, the second axis of a sample: each chunk takes all the steps of the
    schedule while those before it are clean and those after it are noise. T is then `chunks` times the schedule's
    length, and a step's velocity, mean and log-probability are those of its chunk.
    """

    latents: Tensor | Stored
    """[B, T + 1, ...]: the start noise, then the sample after each step"""
    velocity: Tensor | Stored
    """[B, T, ...]: the guided velocity at each step, of the step's chunk"""
    log_prob: Tensor
    """[B, T]: 0 at deterministic steps"""
    eta: Tensor
    """[B, T]: noise level of each step, 0 where it is deterministic, be it by the plan or by the kernel"""
    sigmas: Tensor = field(metadata=SHARED)
    """[T / chunks + 1]: the schedule, ending in 0"""
    chunks: int = field(default=1, metadata=SHARED)
    """Chunks of frames, made one after the other; 1: a sample is made as a whole."""
    nodes: Tensor | None = None
    """[B, T + 1] integers: equal numbers at a depth mark one state, on a shared path; None: no shared path."""

    @property
    def mask(self) -> Tensor:
        """[B, T] bool: the stochastic steps."""
        return self.eta > 0

    @property
    def final(self) -> Tensor:
        """[B, ...]: the finished samples."""
        return self.latents[:, -1]

    def levels(self, steps: Tensor) -> tuple[Tensor, Tensor]:
        """[N] noise levels that these steps [N] leave from and arrive at."""
        at = steps % (len(self.sigmas) - 1)
        return self.sigmas[at], self.sigmas[at + 1]

    def part(self, x: Tensor, steps: Tensor) -> Tensor:
        """Of each sample [N, ...] the chunk that the step of its own, [N], changes."""
        if self.chunks == 1:
            return x
        rows = torch.arange(len(x), device=x.device)
        return x.unflatten(2, (self.chunks, -1))[rows, :, steps // (len(self.sigmas) - 1)]

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Join trajectories that share one schedule and, from part to part, no state."""
        if any(piece.nodes is not None for piece in parts):
            apart, count = [], 0
            for piece in parts:
                nodes = piece.numbered() + count
                apart.append(replace(piece, nodes=nodes))
                count = int(nodes.max()) + 1
            parts = apart
        return super().cat(parts)

    def stored(self, allocate: Allocate) -> Self:
        """The same with states and velocities on the host."""
        latents, velocity = Stored.of(self.latents[:], allocate), Stored.of(self.velocity[:], allocate)
        return replace(self, latents=latents, velocity=velocity)

    def numbered(self) -> Tensor:
        """[B, T + 1] `nodes`, and where no state is shared, a number for each sample."""
        if self.nodes is not None:
            return self.nodes
        batch, states = self.latents.shape[:2]
        return torch.arange(batch, device=self.latents.device)[:, None].expand(batch, states)

    def distinct(self, samples: Tensor, steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The different states among the pairs (samples[n], steps[n]).

        Returns:
            [M] sample and [M] step of each, and [N] which of the M a pair is at.
        """
        first, inverse = distinct_rows(self.states(samples, steps))
        return samples[first], steps[first], inverse

    def states(self, samples: Tensor, steps: Tensor) -> Tensor:
        """[N] numbers of the states that the pairs (samples[n], steps[n]) are at; equal ones are one state."""
        nodes = self.numbered()
        return nodes[samples, steps] + (nodes.max() + 1) * steps

    def score(
        self, kernel: Kernel, velocity: Tensor, samples: Tensor, steps: Tensor, starts: Tensor | None = None
    ) -> Transition:
        """Score stored steps under a new velocity: [N, ...] for the pairs (samples[n], steps[n]).

        Args:
            starts: [N] samples from whose states the steps left; default the same samples.
        """
        return transition(
            kernel,
            self.part(self.latents[samples if starts is None else starts, steps], steps),
            velocity,
            *self.levels(steps),
            self.eta[samples, steps],
            next=self.part(self.latents[samples, steps + 1], steps),
        )


class Recorder:
    """Takes a batch down the schedule one velocity at a time and keeps every step.

    Args:
        x: [B, ...] start noise.
        sigmas: [T + 1], ending in 0.
        kernel: the transition kernel.
        eta: [T] or [B, T] on the CPU, noise level of each step; the host reads it to know which steps need noise.
        seeds: B seeds of the step noise.
        order: 2 takes the steps after the last stochastic one by DPM-Solver++ instead of Euler's rule; its history
            begins with that stochastic step (MixGRPO-Flash, arXiv 2507.21802). Only of samples made as a whole.
        chunks: chunks of frames that go down the schedule one after the other, as of `Trajectory`; `eta` is each one's.
    """

    def __init__(
        self,
        x: Tensor,
        sigmas: Tensor,
        kernel: Kernel,
        eta: Tensor,
        seeds: Sequence[int],
        order: Literal[1, 2] = 1,
        chunks: int = 1,
    ) -> None:
        self.x = x.float()
        self.sigmas = sigmas.to(x.device, torch.float32)
        self.kernel, self.chunks = kernel, chunks
        eta = torch.cat([eta] * chunks, -1)
        noisy = eta.cpu().gt(0).expand(len(x), -1)
        self.noisy: list[list[bool]] = noisy.T.tolist()
        self.stochastic: list[bool] = noisy.any(0).tolist()
        self.eta = eta.to(x.device, torch.float32).expand(len(x), -1)
        self.sources = generators(seeds)
        self.last = max((k for k, noisy in enumerate(self.stochastic) if noisy), default=-1)
        self.solver = DPMSolver(self.sigmas[max(self.last, 0) :]) if order == 2 else None
        self.latents = [self.x]
        self.velocities: list[Tensor] = []
        self.log_probs: list[Tensor] = []
        self.etas: list[Tensor] = []

    def step(self, velocity: Tensor) -> Tensor:
        """Make the next transition and return the new sample, [B, ...] float32.

        Args:
            velocity: [B, ...] at the sample, of the step's chunk.
        """
        k, batch = len(self.velocities), len(self.x)
        chunk, at = divmod(k, len(self.sigmas) - 1)
        frames = self.x.chunk(self.chunks, 2) if self.chunks > 1 else (self.x,)
        # a sample's noise does not depend on what the others of its batch draw
        shape, device = frames[chunk].shape[1:], self.x.device
        noise = normal(shape, self.sources, device, self.noisy[k]) if self.stochastic[k] else None
        transitioned = transition(
            self.kernel,
            frames[chunk],
            velocity,
            self.sigmas[at].expand(batch),
            self.sigmas[at + 1].expand(batch),
            self.eta[:, k],
            noise=noise,
        )
        x = transitioned.next
        if self.chunks > 1:
            x = torch.cat([*frames[:chunk], x, *frames[chunk + 1 :]], 2)
        if self.solver is not None and k >= self.last:
            solved = self.solver.step(self.x, velocity)
            x = solved if k > self.last else x
        self.x = x
        self.latents.append(x)
        self.velocities.append(velocity.float())
        self.log_probs.append(transitioned.log_prob)
        self.etas.append(self.eta[:, k] * transitioned.stochastic)
        return x

    def keep(self, rows: Tensor) -> None:
        """Go on with these samples alone, [N] indices, as if the others had not begun."""
        numbers = rows.tolist()
        self.x, self.eta = self.x[rows], self.eta[rows]
        self.sources = [self.sources[n] for n in numbers]
        self.noisy = [[noisy[n] for n in numbers] for noisy in self.noisy]
        for column in (self.latents, self.velocities, self.log_probs, self.etas):
            column[:] = [values[rows] for values in column]

    def trajectory(self) -> Trajectory:
        """The record of the steps made; call after the last one."""
        return Trajectory(
            latents=torch.stack(self.latents, 1),
            velocity=torch.stack(self.velocities, 1),
            log_prob=torch.stack(self.log_probs, 1),
            eta=torch.stack(self.etas, 1),
            sigmas=self.sigmas,
            chunks=self.chunks,
        )
