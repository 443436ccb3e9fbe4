"""The gradient window: steps of a rollout walked again with gradients, holding one step's activations at a time."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flowalign.policies.diffusion.policy import DiffusersPolicy
from flowalign.policies.diffusion.rollout import Rollout
from samplers import Transition, transition


@contextlib.contextmanager
def unwrapped(policy: DiffusersPolicy) -> Iterator[None]:
    """Within it calls with gradients go to the network itself, not to the wrapper that averages gradients.

    A wrapper must not be entered in the backward pass, where it is already waiting for those gradients.
    """
    policy.model, wrapped = policy._bare, policy.model
    try:
        yield
    finally:
        policy.model = wrapped


class GradientWindow:
    """Some samples of a rollout, whose steps can be walked again under the current weights.

    What the network computes in a step is not kept but computed again in the backward pass, so that memory grows by
    one state a step. Steps are numbers of the rollout's schedule, 0 .. T - 1; states 0 .. T, the last one finished.

    Args:
        samples: [N] of the rollout.
        compare: measure at every call with gradients how far the velocity is from the start weights'.
        frozen: the start weights take the steps, and gradients are of the states alone; needs a LoRA.
    """

    def __init__(
        self,
        policy: DiffusersPolicy,
        rollout: Rollout,
        samples: Tensor,
        compare: bool = False,
        frozen: bool = False,
    ) -> None:
        self.policy, self.rollout, self.samples, self.compare = policy, rollout, samples, compare
        self.frozen = frozen
        self.sigmas = rollout.trajectory.sigmas
        self.last = len(self.sigmas) - 1
        self._divergences: list[Tensor] = []

    def state(self, step: int | Tensor) -> Tensor:
        """[N, ...] the states that the rollout went through, without a gradient."""
        return self.rollout.trajectory.latents[self.samples, self._each(step)]

    def velocity(self, x: Tensor, step: int | Tensor) -> Tensor:
        """[N, ...] velocities of the current weights at states x [N, ...], with gradients to both."""
        steps = self._each(step)

        def evaluate(x: Tensor) -> Tensor:
            with contextlib.ExitStack() as weights:
                if self.frozen:
                    weights.enter_context(self.policy.reference())
                    weights.enter_context(unwrapped(self.policy))
                return self.policy.velocity(self.rollout, self.samples, steps, x).float()

        velocity: Tensor = checkpoint(
            evaluate,
            x,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (contextlib.nullcontext(), unwrapped(self.policy)),
        )
        if self.compare and torch.is_grad_enabled():
            with torch.no_grad(), self.policy.reference():
                reference = self.policy.velocity(self.rollout, self.samples, steps, x).float()
            self._divergences.append((velocity - reference).square().flatten(1).mean(1))
        return velocity

    def transition(self, x: Tensor, step: int | Tensor) -> Transition:
        """The kernel's step from states x [N, ...], to its mean."""
        steps, eta = self._each(step), self.rollout.trajectory.eta
        at, to, eta = self.sigmas[steps], self.sigmas[steps + 1], eta[self.samples, steps]
        return transition(self.rollout.kernel, x, self.velocity(x, steps), at, to, eta)

    def step(self, x: Tensor, step: int | Tensor) -> Tensor:
        """[N, ...] the next states: the kernel's mean at x, and the very noise that the rollout drew there."""
        steps, trajectory = self._each(step), self.rollout.trajectory
        drawn = trajectory.velocity[self.samples, steps]
        mean = trajectory.score(self.rollout.kernel, drawn, self.samples, steps).mean
        return self.transition(x, steps).mean + (trajectory.latents[self.samples, steps + 1] - mean)

    def walk(self, x: Tensor, first: int | Tensor) -> Tensor:
        """[N, ...] finished samples, from states x [N, ...] at step `first`, a number or [N] steps."""
        if isinstance(first, int):
            for step in range(first, self.last):
                x = self.step(x, step)
            return x
        for step in range(int(first.min()), self.last):
            begun, compared = first <= step, len(self._divergences)
            x = torch.where(begun.view(-1, *[1] * (x.dim() - 1)), self.step(x, step), x)
            self._divergences[compared:] = [each.where(begun, torch.nan) for each in self._divergences[compared:]]
        return x

    def leap(self, x: Tensor, step: int | Tensor, to: int | Tensor | None = None) -> Tensor:
        """[N, ...] states at `to` by one straight line from x [N, ...] at `step`; by default the predicted x0."""
        at, end = self.sigmas[self._each(step)], self.sigmas[self._each(self.last if to is None else to)]
        return x + self.velocity(x, step) * (end - at).view(-1, *[1] * (x.dim() - 1))

    def noised(self, x0: Tensor, noise: Tensor, step: int | Tensor) -> Tensor:
        """[N, ...] finished samples x0 [N, ...] brought to the noise level of a step."""
        sigma = self.sigmas[self._each(step)].view(-1, *[1] * (x0.dim() - 1))
        return (1 - sigma) * x0 + sigma * noise

    def recovered(self, x: Tensor, noise: Tensor, step: int | Tensor) -> Tensor:
        """[M, ...] x0 of states [M, ...] below noise level 1, given the noise in them: the inverse of `noised`."""
        sigma = self.sigmas[step].view(-1, *[1] * (x.dim() - 1))
        return (x - sigma * noise) / (1 - sigma)

    @property
    def divergence(self) -> Tensor:
        """[N] mean squared difference from the start weights' velocities, over the calls so far."""
        return torch.stack(self._divergences).nanmean(0)

    def _each(self, step: int | Tensor) -> Tensor:
        return torch.full_like(self.samples, step) if isinstance(step, int) else step
