"""What is compared before training: a replay with its rollout, and a rollout with the ODE."""

import math
from typing import Any

import torch

from flowalign.errors import FlowalignError
from flowalign.policies.diffusion.rollout import Rollout
from samplers import step_spread
from samplers.completion import complete, path
from samplers.kernels import traits_of

LARGEST_RATIO = 5
"""Largest ratio of the standard deviations of the finished latents of a rollout and of the ODE; they are alike."""
LARGEST_SPREAD = 3
"""Largest standard deviation after a step, over the next level's; published kernels reach 2.4 in 4 steps."""

TF32_TOLERANCE = 1e-2
"""Tolerance of a replay in TF32, whose factors have two bits more than those of bfloat16: estimated, not measured."""


def replay_tolerance(policy: Any) -> float:
    """Largest difference of a replayed velocity from the rollout's that is rounding, over the largest velocity."""
    if policy.compute_dtype != torch.float32:
        return 5e-2
    tf32 = policy.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    return max(float(policy.family.tolerance), TF32_TOLERANCE if tf32 else 0.0)


@torch.no_grad()
def check_replay(policy: Any, rollout: Rollout) -> float:
    """Compare velocities, on up to 8 pairs of the first and last steps, relative to the largest.

    And the finished latents with the ODE's, which noise must not leave by far. Of a rollout with a feature cache the
    first step alone is compared, where the cache is empty.
    """
    count, last = min(len(rollout), 4), 0 if rollout.cached else rollout.trajectory.velocity.shape[1] - 1
    samples = torch.arange(count, device=policy.device).repeat(2)
    steps = torch.tensor([0] * count + [last] * count, device=policy.device)
    recorded = rollout.trajectory.velocity[samples, steps]
    name, largest = type(policy.pipeline).__name__, float(recorded.abs().max())
    if not 0 < largest < math.inf:
        what = "all 0" if largest == 0 else "not finite"
        raise FlowalignError(
            f"the velocities of {name} are {what} in {policy.compute_dtype}; model.dtype: float32 may work"
        )
    forwards = policy.forwards
    replayed, again = (policy.velocity(rollout, samples, steps).float() for _ in range(2))
    relative, apart = (float((replayed - other).abs().max()) / largest for other in (recorded, again))
    tolerance = replay_tolerance(policy)
    if not relative <= tolerance:
        cause = "its family needs its own velocity or encode"
        if not apart <= tolerance:
            cause = "its network answers otherwise each time (dropout, a kernel that is not deterministic)"
        raise FlowalignError(
            f"replaying {name} differs from its rollout by {relative:.2g} "
            f"(at most {tolerance:g} is numerical noise); {cause}"
        )
    if rollout.trajectory.mask.any():
        _check_noise(policy, rollout)
    policy.forwards = forwards
    return relative


def _check_noise(policy: Any, rollout: Rollout) -> None:
    """Refuse a step that leaves the schedule, and finished latents that are too large or too small to be samples.

    A network brings back much of what one step's noise did, so that the steps are looked at themselves.
    """
    trajectory, name = rollout.trajectory, type(policy.pipeline).__name__
    advice = "a smaller rollout.eta, more rollout.steps or kernel: dance_sde would work"
    if not traits_of(rollout.kernel).learned:
        # the last step's noise is in the finished latents
        eta = trajectory.eta.amax(0).unflatten(0, (trajectory.chunks, -1)).amax(0)
        spread = step_spread(rollout.kernel, trajectory.sigmas, eta)[:-1]
        if spread.numel() and not spread.max() <= LARGEST_SPREAD:
            raise FlowalignError(
                f"the kernel's noise takes {name} away from its samples: after step {int(spread.argmax()) + 1} of "
                f"{len(spread) + 1} a state has a standard deviation of {float(spread.max()):.2g} times what its noise "
                f"level says; {advice}"
            )
    if trajectory.chunks > 1:
        # a completion by the ODE is of a sample made as a whole
        return
    rows = torch.arange(min(len(rollout), 2), device=policy.device)
    start, whole = trajectory.latents[rows, 0], [path(0, trajectory.velocity.shape[1])] * len(rows)
    by_ode = complete(policy.at(rollout), start, rows, whole, trajectory.sigmas, trajectory.velocity[rows, 0])
    sampled, expected = float(trajectory.final[rows].std()), float(by_ode.std())
    if not expected / LARGEST_RATIO <= sampled <= expected * LARGEST_RATIO:
        raise FlowalignError(
            f"the kernel's noise takes {name} away from its samples: finished latents have a standard deviation of "
            f"{sampled:.2g}, the ODE's {expected:.2g}; {advice}"
        )
