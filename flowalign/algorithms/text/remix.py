"""ReMix: old texts beside new ones, held by two divergences, with a new start half-way (arXiv 2507.06892).

Loss: GRPO's on new and old texts, plus kl_weight (lambda KL(pi || base) + (1 - lambda) KL(pi || the weights that
sampled)). lambda is 1 up to the iteration `hold`, then falls by 0.1 every `every` iterations, at least to `least`. At
the iteration `reincarnate` the base becomes the policy of then; before it `data.replay: {share: 0.4, until: ...}` mixes
old groups in, and `training.passes: 2` learns from all twice.

After accounts of the paper (the schedule's and the shares' numbers are its own); no code was published. Departures: the
weights that sampled a text, which for an old one are older, stand for the precedent policy; an old text's ratio is
clipped around 1, and not around that of the weights of now.
"""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms.policy_gradient import ActionExperience
from flowalign.algorithms.text import base as language
from flowalign.config import TextConfig
from flowalign.core.divergences import sampled_kl
from flowalign.core.record import Actions, Record
from flowalign.errors import ConfigError
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.settings import Snapshot
from flowalign.rollouts.language import SampledTexts
from flowalign.rollouts.processes import Processes

BASE = "base"


class ReMixSettings(language.LanguageSettings):
    kl_weight: float = Field(0.001, gt=0)
    hold: int = Field(50, ge=0)
    every: int = Field(10, ge=1)
    least: float = Field(0.5, ge=0, le=1)
    reincarnate: int | None = Field(50, ge=1)
    """Iteration at which the base becomes the policy; null: never."""


class ReMix(language.LanguageAlgorithm):
    """ReMix: GRPO on new and old groups, near its base and near itself (arXiv 2507.06892)."""

    name = "remix"
    Settings: ClassVar[type[ReMixSettings]] = ReMixSettings
    settings: ReMixSettings
    iteration = 0

    @property
    def snapshots(self) -> dict[str, Snapshot]:
        """The base, which moves when it is told to."""
        return {BASE: Snapshot(decay=1.0)}

    @property
    def uses_reference(self) -> bool:
        return self.needs("reference")

    def check(self, config: TextConfig) -> None:
        super().check(config)
        if self.settings.kl_reference != "reference":
            raise ConfigError("algorithm.kl_reference: remix has a base of its own; leave it out")

    def experience(self, sampled: SampledTexts, record: Record, processes: Processes) -> ActionExperience:
        self.iteration, snapshots = sampled.batch.iteration, sampled.sampler.policy.snapshots
        if self.iteration == self.settings.reincarnate and snapshots is not None:
            snapshots.reset(BASE)
        experience = super().experience(sampled, record, processes)
        experience.metrics["policy/base_share"] = self.base_share
        return experience

    @property
    def base_share(self) -> float:
        """lambda, the base's share of the divergence."""
        s = self.settings
        return convex_share(self.iteration, s.hold, s.every, s.least)

    def penalties(
        self, policy: LanguagePolicy, experience: ActionExperience, rows: Tensor, tokens: Actions
    ) -> dict[str, tuple[float, Tensor]]:
        s, share = self.settings, self.base_share
        with torch.no_grad(), policy.snapshot(BASE):
            base, _ = policy.log_probs(experience.rollout, rows)
        of_base = sampled_kl(tokens.log_prob, base, s.kl_estimate)
        of_itself = sampled_kl(tokens.log_prob, tokens.old_log_prob, s.kl_estimate)
        return {
            "policy/kl": (s.kl_weight * share, of_base),
            "policy/kl_precedent": (s.kl_weight * (1 - share), of_itself),
        }


def convex_share(iteration: int, hold: int, every: int, least: float) -> float:
    """1 up to `hold`, then 0.1 less from every further `every` iterations on, at least `least`."""
    return max(1 - 0.1 * -(-max(iteration - hold, 0) // every), least)
