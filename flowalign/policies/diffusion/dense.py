"""What the states of sampled trajectories are worth: each finished by the ODE, decoded and scored."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from PIL.Image import Image
from torch import Tensor

from flowalign.core.credit import dense_rewards
from flowalign.runs.show import Grid
from rewards import Reward, as_reward, score
from samplers.completion import completions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from flowalign.policies.diffusion.rollout import Rollout


@dataclass(repr=False)
class Dense:
    """The worth of every state of B trajectories of T steps."""

    values: Tensor
    """[B, T + 1] the reward of each state's completion, R_0 .. R_T"""
    sigmas: Tensor
    """[T + 1]"""
    mask: Tensor
    """[B, T] bool: the stochastic steps"""

    @property
    def gains(self) -> Tensor:
        """[B, T] what each step earned, R_k - R_{k-1} (DenseGRPO, arXiv 2601.20218)."""
        return dense_rewards(self.values)

    def __repr__(self) -> str:
        batch, states = self.values.shape
        return f"Dense({batch} samples of {states - 1} steps, final reward {self.values[:, -1].mean():.3f})"

    def plot(self) -> "Figure":
        """A curve of the values for each sample, over the steps."""
        from matplotlib import pyplot

        figure, axes = pyplot.subplots()
        axes.plot(self.values.T, marker=".")
        axes.set_xlabel("state after k steps")
        axes.set_ylabel("reward of its completion")
        return figure


def dense(
    rollout: "Rollout",
    reward: Reward | Callable[..., Sequence[float]],
    metadata: Sequence[Mapping[str, Any]] = (),
    batch_size: int = 64,
) -> Dense:
    """Score what every state of a rollout would end in.

    Args:
        metadata: of the B samples' prompts, for rewards that need them.
        batch_size: samples a network call.
    """
    images, samples, steps, index = _ends(rollout, batch_size)
    records = list(metadata) or [{}] * len(rollout)
    # samples finished from one step are a group
    known = [{"group": step} | dict(records[row]) for row, step in zip(samples, steps, strict=True)]
    values = score(as_reward(reward), images, [rollout.prompts[row] for row in samples], known).value
    trajectory = rollout.trajectory
    return Dense(values[index], trajectory.sigmas.cpu(), trajectory.mask.cpu())


def film(rollout: "Rollout", batch_size: int = 64) -> Grid:
    """A row a sample: what each of its states would end in, from the start noise to the finished sample."""
    images, _, _, index = _ends(rollout, batch_size)
    captions = [f"sigma {sigma:.2f}" for sigma in rollout.trajectory.sigmas.tolist()]
    return Grid([[images[state] for state in row] for row in index.tolist()], [captions] * len(rollout))


def _ends(rollout: "Rollout", batch_size: int) -> tuple[list[Image], list[int], list[int], Tensor]:
    """Pictures of the distinct completions, the sample and the step of each, and [B, T + 1] which state has which."""
    policy = rollout.policy
    with torch.no_grad():
        made = completions(policy.at(rollout), rollout.trajectory, batch_size=batch_size)
    images = policy.decode_latents(rollout.whole(made.latents, made.samples), batch_size)
    return images, made.samples.tolist(), made.steps.tolist(), made.index.cpu()
