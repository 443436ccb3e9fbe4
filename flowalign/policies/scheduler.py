"""A diffusers scheduler whose steps are recorded, stochastic transitions."""

from collections.abc import Sequence
from typing import Any, Literal

from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from flowalign.errors import FlowalignError
from samplers import Recorder
from samplers.kernels import Kernel


class TransitionScheduler(FlowMatchEulerDiscreteScheduler):
    """Takes the place of a pipeline's flow-matching scheduler for one rollout.

    The schedule (`set_timesteps`, static or resolution-dependent shift) stays the parent's and thereby the
    pipeline's business; only `step` is ours. The float32 sample is kept here: what the pipeline carries between
    steps is its copy in the network's dtype.
    """

    kernel: Kernel
    eta: Tensor | None
    seeds: Sequence[int]
    order: Literal[1, 2]
    recorder: Recorder | None

    @classmethod
    def like(
        cls, scheduler: Any, kernel: Kernel, eta: Tensor | None, seeds: Sequence[int], order: Literal[1, 2] = 1
    ) -> "TransitionScheduler":
        """A scheduler with the configuration of the pipeline's own.

        Args:
            eta: [T] or [B, T] noise levels, None for the ODE.
            seeds: B seeds of the step noise.
            order: of the solver after the last stochastic step, as of `Recorder`.
        """
        if not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
            raise FlowalignError(
                f"the pipeline's scheduler is {type(scheduler).__name__}; "
                "stochastic rollouts need a FlowMatchEulerDiscreteScheduler"
            )
        made = cls.from_config(scheduler.config)
        # set_shift() changes the shift behind the configuration's back
        made.set_shift(scheduler.shift)
        made.kernel, made.eta, made.seeds, made.order, made.recorder = kernel, eta, seeds, order, None
        return made

    def step(self, model_output: Tensor, timestep: Any, sample: Tensor, **_: Any) -> tuple[Tensor]:
        """Make and record the next transition from the pipeline's guided velocity."""
        if self.recorder is None:
            steps = len(self.sigmas) - 1
            eta = self.sigmas.new_zeros(steps) if self.eta is None else self.eta
            if eta.shape[-1] != steps:
                raise FlowalignError(f"the plan has {eta.shape[-1]} steps, the pipeline's schedule {steps}")
            self.recorder = Recorder(sample, self.sigmas, self.kernel, eta, self.seeds, self.order)
        return (self.recorder.step(model_output).to(sample.dtype),)


class LevelScheduler(TransitionScheduler):
    """Walks the noise levels without moving: for the arguments a pipeline calls its denoiser with at each of them."""

    shape: tuple[int, ...]
    """of the latents"""

    def step(self, model_output: Tensor, timestep: Any, sample: Tensor, **_: Any) -> tuple[Tensor]:
        self.shape = tuple(sample.shape)
        return (sample,)
