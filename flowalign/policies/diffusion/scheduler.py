"""A diffusers scheduler whose steps are recorded, stochastic transitions."""

import copy
import functools
import inspect
from collections.abc import Sequence
from typing import Any, Literal

import torch
from diffusers import SchedulerMixin
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteSchedulerOutput as Stepped
from torch import Tensor

from flowalign.errors import FlowalignError
from flowalign.policies.diffusion.families import Family
from samplers import Recorder
from samplers.kernels import Kernel


class TransitionScheduler:
    """Takes the place of a pipeline's scheduler for one rollout.

    The schedule (`set_timesteps`, static or resolution-dependent shift) is made by a copy of the pipeline's own
    scheduler, to which everything but `step` goes. The float32 sample is kept here, in the family's coordinates; the
    pipeline's loop has a copy in the network's dtype.

    Args:
        own: the pipeline's scheduler.
        size: H, W or F, H, W of the latents: `Family.size`.
        eta: [T] or [B, T] noise levels, None for the ODE.
        seeds: B seeds of the step noise.
        order: order of the solver after the last stochastic step: 1 or 2, see `Recorder`.
        chunks: chunks of frames that are made one after the other.
    """

    def __init__(
        self,
        own: SchedulerMixin,
        family: Family,
        size: Sequence[int],
        kernel: Kernel,
        eta: Tensor | None,
        seeds: Sequence[int],
        order: Literal[1, 2] = 1,
        chunks: int = 1,
    ) -> None:
        self.walked = copy.deepcopy(family.scheduler(own))
        self.family, self.size = family, size
        self.kernel, self.eta, self.seeds, self.order = kernel, eta, seeds, order
        self.chunks = chunks
        self.recorder: Recorder | None = None
        self.loop_shape: tuple[int, ...] = ()
        """Shape of the latents in the pipeline's loop."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.walked, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> SchedulerMixin:
        """A pipeline's copy for what it samples along (the sound of a video) walks the ODE and records nothing."""
        return copy.deepcopy(self.walked, memo)

    @property
    def taken(self) -> int:
        """Steps so far."""
        return 0 if self.recorder is None else len(self.recorder.velocities)

    @property
    def level(self) -> float:
        """The noise level of the state that the network is asked of."""
        return float(self.levels[self.taken])

    @property
    def levels(self) -> Tensor:
        """[T + 1] noise levels, ending in 0."""
        return self.family.sigmas(self.walked)

    def step(self, model_output: Tensor, timestep: Tensor | float, sample: Tensor, **_: object) -> Stepped:
        """Make and record the next transition from the pipeline's guided prediction."""
        family, recorder = self.family, self.recorder
        # some pipelines step both copies of guidance (DiT)
        count = len(self.seeds)
        copies, sample = len(sample) // count, sample[:count]
        if recorder is None:
            recorder = self.recorder = self._start(sample)
        at, to = recorder.sigmas[len(recorder.velocities) :][:2]
        output = family.unpack(family.handed(model_output[:count], sample, at), self.size)
        velocity = family.flow_velocity(output, recorder.x, at, self.walked)
        steps = len(recorder.sigmas) - 1
        x = recorder.step(family.own_step(velocity, recorder.x, at, to, steps, self.walked)) * family.loop_scale(to)
        stepped = family.pack(x).to(sample.dtype)
        return Stepped(prev_sample=stepped if copies == 1 else torch.cat([stepped] * copies))

    def _start(self, sample: Tensor) -> Recorder:
        levels = self.levels
        steps = len(levels) - 1
        eta = torch.zeros(steps) if self.eta is None else self.eta
        if eta.shape[-1] != steps:
            raise FlowalignError(f"the plan has {eta.shape[-1]} steps, the pipeline's schedule {steps}")
        if not levels.isfinite().all():
            name = type(self.walked).__name__
            raise FlowalignError(f"{name} gives noise levels that are not finite for {steps} steps; more steps work")
        self.loop_shape = tuple(sample.shape)
        x = self.family.unpack(sample, self.size).float() / self.family.loop_scale(levels[0].to(sample.device))
        return Recorder(x, levels, self.kernel, eta, self.seeds, self.order, self.chunks)


class StartScheduler(TransitionScheduler):
    """Stays at the start noise and records it as every state: the schedule and what a sample begins with."""

    def step(self, model_output: Tensor, timestep: Tensor | float, sample: Tensor, **_: object) -> Stepped:
        self.recorder = self.recorder or self._start(sample[: len(self.seeds)])
        still = torch.zeros_like(self.recorder.x)
        self.recorder.step(still.chunk(self.chunks, 2)[0] if self.chunks > 1 else still)
        return Stepped(prev_sample=sample)


class LevelScheduler(TransitionScheduler):
    """Leaves the latents as they are at every noise level; shows what a pipeline calls its denoiser with there.

    Args:
        levels: [K] falling, before the pipeline's own shift; None walks the schedule.
    """

    shape: tuple[int, ...]

    def __init__(self, *args: Any, levels: Tensor | None = None, **settings: Any) -> None:
        self.wanted = levels
        super().__init__(*args, **settings)

    def __getattr__(self, name: str) -> Any:
        value, levels = super().__getattr__(name), self.wanted
        if name != "set_timesteps" or levels is None:
            return value
        signature = inspect.signature(value)

        # a pipeline reads the signature
        @functools.wraps(value)
        def set_timesteps(*args: object, **settings: object) -> None:
            arguments = signature.bind(*args, **settings).arguments
            # of given levels Karras' spacing takes the number alone
            if "sigmas" in signature.parameters and not self.walked.config.get("use_karras_sigmas"):
                value(**arguments | {"num_inference_steps": len(levels), "sigmas": levels.numpy()})
            else:
                value(**arguments)
                self.family.put_levels(self.walked, levels)

        return set_timesteps

    def step(self, model_output: Tensor, timestep: Tensor | float, sample: Tensor, **_: object) -> Stepped:
        self.loop_shape = tuple(sample.shape)
        self.shape = tuple(self.family.unpack(sample, self.size).shape)
        return Stepped(prev_sample=sample)
