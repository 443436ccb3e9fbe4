"""What the states of sampled trajectories are worth: each finished by the ODE, decoded and scored."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from flowalign.core.credit import dense_rewards

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(repr=False)
class Dense:
    """The worth of every state of B trajectories of T steps."""

    values: Tensor
    """[B, T + 1] the reward of each state's completion, R_0 .. R_T"""
    sigmas: Tensor
    """[T + 1] the schedule."""
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
