"""The one record of what happened, and the stored actions under the current weights."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowalign.errors import ConfigError, nearest


@dataclass(kw_only=True)
class Record:
    """B trajectories of T actions, over all processes; an action is a denoising step or a token."""

    reward: Tensor
    """[B], or [B, T] where every action has its own"""
    group: Tensor
    """[B] integers"""
    mask: Tensor
    """[B, T] bool: the sampled actions."""
    log_prob: Tensor
    """[B, T] log-probabilities under the sampling weights."""
    rewards: Tensor
    """[L, B] values of each reward of the sum."""
    reward_weights: Tensor
    """[L] weights of the rewards in the sum."""
    names: tuple[str, ...] = ()
    seed: int = 0
    """Seed of this iteration's random choices, the same on every process."""
    entropy: Tensor | None = None
    """[B, T] entropy of the distribution that each action was drawn from, where it is known."""
    collision: Tensor | None = None
    """[B, T] sum of the squared probabilities of the distribution that each action was drawn from; where an advantage
    needs it"""
    influence: Tensor | None = None
    """[B, T] influence of each action on the group's right trajectories; where an advantage needs it"""
    reference: Tensor | None = None
    """[B, T] log-probabilities under the start weights; where an advantage needs them"""
    value: Tensor | None = None
    """[B, T] a critic's value of the state before each action, where an advantage needs it"""
    baseline: Tensor | None = None
    """[B] reward of the most probable trajectory of the row's prompt, where an advantage needs it"""
    state: Tensor | None = None
    """[B, T] integers: actions of one number were taken in one and the same state; where an advantage needs it"""
    steps: Tensor | None = None
    """[B, T] rewards of the steps that end with these actions, NaN elsewhere; None without step rewards."""
    turn: Tensor | None = None
    """[B, T] integers from 0: neighbouring actions of one number are one turn; None: each action is its own turn."""
    ended: Tensor | None = None
    """[B] bool: the trajectory came to its end and was not cut."""
    confidence: Tensor | None = None
    """[B] confidence of the rewards: factor of the advantages."""

    def reward_of(self, name: str) -> Tensor:
        """[B] the one of `rewards` that has this name.

        Raises:
            ConfigError: there is none.
        """
        if name not in self.names:
            raise ConfigError(f"no reward of this run is called '{name}'; {nearest(name, self.names)}")
        return self.rewards[self.names.index(name)]


@dataclass(kw_only=True)
class Actions:
    """Stored actions under the current weights, N steps or [N, T] tokens; gradients flow through `log_prob`."""

    log_prob: Tensor
    """[N] or [N, T]"""
    old_log_prob: Tensor
    """[N] or [N, T] log-probabilities under the weights that the ratio refers to."""
    advantage: Tensor
    mask: Tensor
    """[N] or [N, T] bool: the sampled actions."""
    group: Tensor
    """[N] integers"""
    reward: Tensor
    """[N] reward of the trajectory."""

    @property
    def ratio(self) -> Tensor:
        """Ratio of an action's probability under the current weights to the old one."""
        return ratio_of(self.log_prob, self.old_log_prob)

    @property
    def row_ratio(self) -> Tensor:
        """[N, 1] geometric mean of the ratios of each row's actions, of log-probabilities [N, T]."""
        mean = masked_mean(self.log_prob - self.old_log_prob, self.mask)[:, None]
        return ratio_of(mean, torch.zeros_like(mean))


LARGEST_LOG_RATIO = 20.0
"""Bound of log-ratios: from 88 on a ratio is infinite in float32, and infinity times 0 is not a number."""


def ratio_of(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """exp(log_prob - old_log_prob), its logarithm within +-LARGEST_LOG_RATIO as in verl; no gradient beyond."""
    return (log_prob - old_log_prob).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the actions of each row, 0 for a row without any: [B, T] -> [B]."""
    return (values.where(mask, 0)).sum(1) / mask.sum(1).clamp(min=1)


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over the actions of each row: [B, T] -> [B]."""
    return torch.where(mask, values, 0).sum(1)


@dataclass
class ByTurn:
    """Actions [B, T] by the turns [B, K] they are of."""

    turn: Tensor
    """[B, T] integers, 0 where the mask is False"""
    mask: Tensor
    """[B, T] bool"""

    def sum(self, values: Tensor) -> Tensor:
        """[B, K] sums over the actions of each turn, 0 for a turn that a row has not."""
        totals = values.new_zeros(len(values), int(self.turn.max()) + 1)
        return totals.scatter_add(1, self.turn, values.where(self.mask, 0))

    def spread(self, values: Tensor) -> Tensor:
        """[B, T] of each action its turn's, from [B, K]."""
        return values.gather(1, self.turn)


def by_turn(turn: Tensor | None, mask: Tensor) -> ByTurn:
    """The turns of a record; without any, every action is one."""
    alone = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    return ByTurn((alone if turn is None else turn).where(mask, 0), mask)
