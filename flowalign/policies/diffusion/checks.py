"""What is compared before training: a replay with its rollout, and a rollout with the ODE."""

import math
from typing import Any

import torch

from flowalign.errors import FlowalignError
from flowalign.policies.diffusion.rollout import Rollout
from samplers.completion import complete, path

LARGEST_RATIO = 5
"""of the standard deviations of finished latents, of a rollout and of the ODE; samples of both are alike"""


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
        raise FlowalignError(f"the velocities of {name} are {what} in {policy.dtype}; model.dtype: float32 may work")
    forwards = policy.forwards
    replayed, again = (policy.velocity(rollout, samples, steps).float() for _ in range(2))
    relative, apart = (float((replayed - other).abs().max()) / largest for other in (recorded, again))
    tolerance = policy.family.tolerance if policy.dtype == torch.float32 else 5e-2
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
    """Refuse a rollout whose finished latents are too large or too small to be samples."""
    trajectory = rollout.trajectory
    rows = torch.arange(min(len(rollout), 2), device=policy.device)
    start, whole = trajectory.latents[rows, 0], [path(0, trajectory.velocity.shape[1])] * len(rows)
    made = complete(policy.at(rollout), start, rows, whole, trajectory.sigmas, trajectory.velocity[rows, 0])
    spread, expected = float(trajectory.final[rows].std()), float(made.std())
    if not expected / LARGEST_RATIO <= spread <= expected * LARGEST_RATIO:
        raise FlowalignError(
            f"the kernel's noise takes {type(policy.pipeline).__name__} away from its samples: finished latents have "
            f"a standard deviation of {spread:.2g}, the ODE's {expected:.2g}; a smaller rollout.eta, more "
            "rollout.steps or kernel: dance_sde would work"
        )
