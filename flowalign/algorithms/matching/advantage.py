"""Online methods that compare a sample with the others of its group, and what such a comparison can be refined by."""

import inspect
from typing import ClassVar

import torch
from pydantic import Field
from torch import Generator, Tensor

from flowalign.algorithms.base import AlgorithmSettings
from flowalign.algorithms.matching.base import MatchingExperience, Points
from flowalign.algorithms.matching.online import OnlineMatching, OnlineSettings
from flowalign.config import Config, Named
from flowalign.core.groups import group_mean_std
from flowalign.core.record import Record
from flowalign.errors import ConfigError, nearest
from flowalign.rollouts.pictures import SampledPictures
from flowalign.rollouts.processes import Processes
from flowalign.settings import Section


class KLGate(Section):
    """Choice of the samples that are held to the start weights (GARDO, arXiv 2512.24138)."""

    by: list[str] = Field(min_length=1)
    """Rewards that should confirm the first one; weight 0 keeps them from being trained on."""
    share: float = Field(0.1, gt=0, lt=1)
    """Share of the samples to hold: those that the first reward ranks furthest above the others' average rank."""


class ComparingSettings(OnlineSettings):
    """Settings of the methods that compare a sample with the others of its group."""

    own_error_weight: float = Field(0.0, ge=0)
    """Weight of the matching error of every sample that the loss sees, good or bad. It holds the velocity near the
    policy's samples. Groups that are left out have no weight."""
    own_states: bool = False
    """Learn at the states that a sample went through, without drawn noise. It is meant for groups whose members leave
    one state: `stochastic`, rollout.share_start_noise, and levels that are that step alone."""


class ComparingMatching(OnlineMatching):
    """Base of the methods that compare a sample with the others of its group."""

    Settings: ClassVar[type[AlgorithmSettings]] = ComparingSettings
    settings: ComparingSettings
    combines = OnlineMatching.combines | {"advantages"}

    def check(self, config: Config) -> None:
        super().check(config)
        if not self.settings.own_states:
            return
        if "noise_of" in self.settings.model_fields_set:
            raise ConfigError("algorithm.noise_of: own states need no drawn noise; leave it out, or own_states: false")
        if self.draw_levels(config.rollout.steps, Generator()).is_floating_point():
            raise ConfigError(
                "algorithm.own_states: a sample has states at the steps of its schedule alone, and these levels lie "
                "between them; levels={name: schedule} works"
            )
        if config.rollout.search is not None:
            raise ConfigError("algorithm.own_states: a search finds samples without their states; search: null works")

    def experience(self, sampled: SampledPictures, record: Record, processes: Processes) -> MatchingExperience:
        experience = super().experience(sampled, record, processes)
        if self.settings.own_states:
            levels, trajectory = experience.level_index, sampled.rollout.trajectory
            rows = torch.arange(len(levels), device=levels.device).repeat_interleave(levels.shape[1])
            states = trajectory.latents[rows, levels.flatten()]
            noise = experience.clean.noise_of(rows, levels.flatten(), states.float())
            experience.noise = noise.view(*levels.shape, *noise.shape[1:])
            if trajectory.nodes is not None:
                experience.state = trajectory.states(rows, levels.flatten()).view_as(levels)
        return experience

    def penalized(self, loss: Tensor, points: Points) -> tuple[Tensor, dict[str, Tensor]]:
        """Also with the weighted error of all samples.

        Advantages have a sum of 0, and a pair one good and one bad sample: where the velocity has left the mean of the
        policy's own samples, they do not pull it back, and in long runs that distance grows.
        """
        loss, values = super().penalized(loss, points)
        if self.settings.own_error_weight:
            loss = loss + self.settings.own_error_weight * points.error
        return loss, values


class AdvantageSettings(ComparingSettings):
    """Settings of the methods by whose loss every sample of a group has an advantage."""

    advantage: Named = Named(name="grpo", clip=5.0)
    """Name in `flowalign list advantages`, with its settings."""
    least_std: float | None = Field(None, ge=0)
    """Standard deviation of rewards up to which a group is left out, also of the KL; published: 0.05, Edit-R1."""
    largest_mean: float | None = None
    """Mean reward from which on a group is left out; published: 0.9."""
    pool_prompts: bool = False
    """Whether groups of a prompt that an iteration draws twice are one group to advantages, as in the authors' code."""
    kl_gate: KLGate | None = None
    """Apply the KL only to samples whose reward others do not confirm."""


class AdvantageMatching(ComparingMatching):
    """Base of the methods by whose loss every sample of a group has an advantage."""

    Settings: ClassVar[type[AlgorithmSettings]] = AdvantageSettings
    settings: AdvantageSettings

    def __init__(self, settings: AdvantageSettings) -> None:
        super().__init__(settings)
        self.advantage_of = settings.advantage.part("advantages", "algorithm.advantage")

    def check(self, config: Config) -> None:
        super().check(config)
        names = [named.name for named in config.rewards]
        bound = inspect.signature(self.advantage_of).parameters
        settings = {"algorithm.advantage.by": [bound["by"].default] if "by" in bound else []}
        settings |= {"algorithm.kl_gate.by": self.settings.kl_gate.by if self.settings.kl_gate else []}
        for where, wanted in settings.items():
            for name in wanted:
                if name not in names:
                    raise ConfigError(f"{where}: no reward of this run is called '{name}'; {nearest(name, names)}")

    def record(self, sampled: SampledPictures, processes: Processes) -> Record:
        record = super().record(sampled, processes)
        if self.settings.pool_prompts:
            record.group = processes.gather(torch.tensor(sampled.batch.pooled, device=processes.device))
        return record

    def credit(self, record: Record) -> Tensor:
        """[B] advantages."""
        advantage: Tensor = self.advantage_of(record)
        return advantage if record.confidence is None else advantage * record.confidence

    def kept(self, record: Record) -> Tensor | None:
        """Edit-R1's masks (arXiv 2510.16888): where a judge cannot tell the members apart, or all are good."""
        least, largest = self.settings.least_std, self.settings.largest_mean
        if least is None and largest is None:
            return None
        mean, std = group_mean_std(record.reward, record.group)
        apart = torch.ones_like(mean, dtype=torch.bool) if least is None else std > least
        return apart if largest is None else apart & (mean < largest)

    def held(self, record: Record) -> Tensor | None:
        """GARDO's gate (arXiv 2512.24138): only what the other rewards do not confirm is held back, if anything is.

        Departure: the authors' code gives the best sample rank 1, and so holds what the first reward ranks *below* the
        others. Of four samples with rewards .1 .2 .3 .9, which another ranks .4 .3 .2 .1, it holds the first; as the
        paper has it, the last is held.
        """
        gate = self.settings.kl_gate
        if gate is None:
            return None
        rewards = torch.stack([record.rewards[0], *(record.reward_of(name) for name in gate.by)])
        ranks = rewards.argsort(1).argsort(1).float()
        doubt = ranks[0] - ranks[1:].mean(0)
        gated = (doubt > doubt[doubt >= 0].quantile(1 - gate.share)).float()
        return gated / gated.mean() if gated.any() else torch.ones_like(gated)
