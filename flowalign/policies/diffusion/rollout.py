"""Trajectories with what is needed to score their transitions again."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from flowalign.data import Source
from flowalign.errors import ConfigError
from flowalign.policies.diffusion.conditions import Conditions, Ragged
from flowalign.policies.diffusion.dense import Dense
from flowalign.policies.diffusion.scales import Scale
from flowalign.runs.show import Grid
from rewards import Reward, as_reward, score
from samplers import Rows, Trajectory
from samplers.completion import completions
from samplers.kernels import Kernel
from samplers.rows import SHARED
from samplers.stored import Allocate, Stored


@dataclass(repr=False, kw_only=True)
class Rollout(Rows):
    """B sampled trajectories and what is needed to score them again."""

    trajectory: Trajectory
    conditions: Conditions | Ragged
    prompts: list[str]
    guidance: tuple[Scale, ...]
    """Classifier-free scale of each network, or one for all; a scale may be one of each step."""
    kernel: Kernel
    sources: list[Source | None]
    first_frames: Tensor | None = None
    """[B, C, F, H, W] latents of a given picture, which were not sampled; None where all were sampled."""
    unlearned: int = 0
    """Number of last steps that are not learned from, though they may be stochastic."""
    rlg: float | Mapping[str, float] = field(default=1.0, metadata=SHARED)
    """Weight of the change by training, as in `DiffusersPolicy.sample`."""
    rlg_from: int = 0
    sound: Tensor | None = None
    """[B, ...] latents of the sound that the pipeline made along with it."""
    cached: bool = field(default=False, metadata=SHARED)
    """Whether a feature cache was on, so that a replay has other velocities."""
    generator: str = field(default="cpu", metadata=SHARED)
    """Device whose generator drew the noise; other than the CPU, seeds do not make it again here."""
    unmoved: Tensor | None = None
    """[B, ...] the start noise before the policy's `start_noise` moved it"""
    written: Rows | None = None
    """Texts of the policy's `writer` that the samples were drawn from, as the writer keeps them."""
    policy: Any = field(default=None, compare=False)

    def __repr__(self) -> str:
        batch, steps = self.mask.shape
        return f"Rollout({batch} samples of {steps} steps, {int(self.mask.any(0).sum())} of them stochastic)"

    @cached_property
    def images(self) -> list[Any]:
        """The finished pictures, or videos as lists of them."""
        return self.policy.decode(self)

    @property
    def log_prob(self) -> Tensor:
        """[B, T] of the steps taken, the mean over a step's elements; 0 at deterministic ones."""
        return self.trajectory.log_prob

    def show(self) -> None:
        """Show the finished pictures: in the cell of a notebook, else in the system's viewer."""
        Grid([self.images], [self.prompts]).show()

    def _repr_html_(self) -> str:
        return Grid([self.images], [self.prompts])._repr_html_()

    def dense(
        self,
        reward: Reward | Callable[..., Sequence[float]],
        metadata: Sequence[Mapping[str, Any]] = (),
        batch_size: int = 64,
    ) -> Dense:
        """Value of each state: the reward of its completion by the ODE.

        Args:
            reward: a reward, or any function (samples, prompts) -> list of floats.
            metadata: metadata of the samples' prompts, for rewards that need them.
            batch_size: samples a network call.
        """
        images, samples, steps, index = self._ends(batch_size)
        records = list(metadata) or [{}] * len(self)
        # samples finished from one step are a group
        known = [{"group": step} | dict(records[row]) for row, step in zip(samples, steps, strict=True)]
        values = score(as_reward(reward), images, [self.prompts[row] for row in samples], known).value
        return Dense(values[index], self.trajectory.sigmas.cpu(), self.mask.cpu())

    def film(self, sample: int, batch_size: int = 64) -> Grid:
        """Pictures that the states of a sample would end in, from the start noise to the finished one."""
        images, _, _, index = self.take(torch.tensor([sample]))._ends(batch_size)
        sigmas = self.trajectory.sigmas.tolist()
        captions = [
            f"{f'Step {step}' if step else 'Start noise'}: sigma {sigma:.2f}" for step, sigma in enumerate(sigmas)
        ]
        return Grid([[images[state] for state in index[0].tolist()]], [captions])

    @torch.no_grad()
    def _ends(self, batch_size: int) -> tuple[list[Any], list[int], list[int], Tensor]:
        """The distinct completions' pictures, the sample and the step of each, and [B, T + 1] which a state ends in."""
        if self.trajectory.chunks > 1:
            raise ConfigError("chunks: states of samples that are made in chunks are not completed; chunks: 1 works")
        finished = completions(self.policy.at(self), self.trajectory, batch_size=batch_size)
        images = self.policy.decode_latents(self.whole(finished.latents, finished.samples), batch_size)
        return images, finished.samples.tolist(), finished.steps.tolist(), finished.index.cpu()

    @property
    def mask(self) -> Tensor:
        """[B, T] bool: the stochastic steps that are learned from."""
        mask, steps = self.trajectory.mask, len(self.trajectory.sigmas) - 1
        return mask & (torch.arange(mask.shape[1], device=mask.device) % steps < steps - self.unlearned)

    def until(self, step: int) -> "Rollout":
        """A rollout that has not begun, on a shorter schedule: `step`, of each chunk, leads to the end."""
        trajectory, conditions = self.trajectory, self.conditions
        assert isinstance(conditions, Conditions)
        length = len(trajectory.sigmas) - 1
        kept = [chunk * length + k for chunk in range(trajectory.chunks) for k in range(step + 1)]
        shorter = replace(trajectory, sigmas=ending(trajectory.sigmas, step + 1))
        guidance = tuple(scale[: step + 1] if isinstance(scale, tuple) else scale for scale in self.guidance)
        return replace(self, trajectory=shorter, conditions=conditions.of_steps(kept), guidance=guidance)

    def stored(self, allocate: Allocate) -> "Rollout":
        """The same with states, velocities and embeddings on the host."""
        if isinstance(self.trajectory.latents, Stored):
            return self
        conditions = self.conditions.stored(allocate)
        return replace(self, trajectory=self.trajectory.stored(allocate), conditions=conditions)

    def reads(self, samples: Tensor, steps: Tensor) -> Iterator[tuple[Stored, tuple[Tensor, ...]]]:
        """Stored tensors that scoring these steps reads, each with its index.

        Args:
            samples, steps: [N], on the host.
        """
        latents, velocity = self.trajectory.latents, self.trajectory.velocity
        if isinstance(latents, Stored) and isinstance(velocity, Stored):
            yield latents, (samples.repeat(2), torch.cat([steps, steps + 1]))
            yield velocity, (samples, steps)
        yield from self.conditions.reads(samples)

    def branch(self, trajectory: Trajectory, samples: Tensor, **changes: object) -> "Rollout":
        """A rollout of other trajectories under the conditions of these samples, [N] indices; without their sound.

        Args:
            changes: fields that differ, such as the kernel.
        """
        return self.take(samples, trajectory=trajectory, sound=None, **changes)

    def whole(self, latents: Tensor, samples: Tensor | None = None) -> Tensor:
        """Latents [N, ...] of these samples, [N] indices and default all, with the frames that were not sampled."""
        if self.first_frames is None:
            return latents
        first = self.first_frames if samples is None else self.first_frames[samples]
        return torch.cat([first.to(latents), latents], 2)

    def packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The trajectories as tensors; the denoiser's other arguments must follow from the prompts.

        Raises:
            ConfigError: it differs between samples, which are of one prompt.
        """
        first, last = (self._denoiser_inputs(row) for row in (0, len(self) - 1))
        if not all(torch.allclose(value, other) for value, other in zip(first, last, strict=True)):
            raise ConfigError(
                "data.replay: this pipeline calls its denoiser with more of each sample's own than its latents, which "
                "is not kept; data.dynamic_sampling works"
            )
        return self.trajectory.tensors(), {}

    def _denoiser_inputs(self, row: int) -> list[Tensor]:
        """The tensors that the denoiser got for a sample at the last step, without the latents."""
        device = self.trajectory.latents.device
        rows = torch.tensor([row], device=device)
        steps = torch.tensor([self.trajectory.mask.shape[1] - 1], device=device)
        conditions = self.conditions
        if isinstance(conditions, Ragged):
            conditions, rows, _ = next(conditions.split(rows))
        leaves, _ = tree_flatten(conditions.gather(rows, steps))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def ending(values: Tensor, step: int) -> Tensor:
    """Values [..., T] up to a step, where they are 0: [..., step + 1]."""
    return torch.cat([values[..., :step], torch.zeros_like(values[..., :1])], -1)
