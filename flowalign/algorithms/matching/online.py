"""Matching on the policy's own samples: prompts and rewards alone, any sampler, no log-probabilities.

Samples come from the weights that `rollout.weights` names, a snapshot of the method's by default, along the ODE
(`rollout.order: 2` for DPM-Solver++) or, with `stochastic`, along the SDE of the rollout's kernel and plan. Their
latents are learned from as they are, without being decoded and encoded again.
"""

import time
from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from flowalign.algorithms.base import AlgorithmSettings, Preview
from flowalign.algorithms.matching.base import Matching, MatchingExperience, MatchingSettings
from flowalign.config import Config
from flowalign.core.record import Record
from flowalign.core.seams import check_shape
from flowalign.data.batches import Batch
from flowalign.policies.diffusion import DiffusersPolicy, Rollout
from flowalign.rollouts.pictures import DiffusionSampler, SampledPictures, record_of_samples
from flowalign.rollouts.processes import Processes
from flowalign.rollouts.scoring import Scorer, score_metrics


class OnlineSettings(MatchingSettings):
    """Settings of the methods that sample."""

    stochastic: bool = False
    """Draw samples along the SDE of rollout.kernel, eta and plan; otherwise along the ODE."""


class OnlineMatching(Matching[Rollout, Record]):
    """Base of the methods that sample."""

    Settings: ClassVar[type[AlgorithmSettings]] = OnlineSettings
    settings: OnlineSettings
    headline = "reward/mean"
    combines = Matching.combines | {"refill", "search", "workers", "served"}
    only_advantages = False
    """Without an advantage a sample teaches nothing."""
    experience_type: ClassVar[type[MatchingExperience]] = MatchingExperience

    def __init__(self, settings: OnlineSettings) -> None:
        super().__init__(settings)
        if settings.stochastic:
            self.noise = "kernel"

    def check(self, config: Config) -> None:
        super().check(config)
        if self.settings.stochastic:
            config.build_plan()

    def without_effect(self, config: Config) -> tuple[list[str], str]:
        rollout, fields = config.rollout, type(config.rollout).model_fields
        if self.settings.stochastic or rollout.kernel == "ode":
            return [], ""
        unused = [key for key in ("kernel", "eta", "plan") if getattr(rollout, key) != fields[key].default]
        why = "samples along the ODE, without noise on the way; algorithm.stochastic: true samples with it"
        return [f"rollout.{key}" for key in unused], why

    def rollout(self, sampler: DiffusionSampler, batch: Batch) -> tuple[Rollout, Batch]:
        """The samples to learn from, sampled or found by a search, and the batch they are of."""
        return (self.sampled(sampler, batch) if sampler.search is None else sampler.found(batch)), batch

    def sampled(self, sampler: DiffusionSampler, batch: Batch) -> Rollout:
        """Samples by plain sampling."""
        eta = None if self.settings.stochastic else torch.zeros(sampler.config.rollout.steps)
        return sampler.rollout(batch, eta)

    def beside(self, rollout: Rollout) -> dict[str, Tensor]:
        """What of the samples is noised beside their pictures, by its name in `ForwardProcess.of`."""
        return {}

    @abstractmethod
    def credit(self, record: Record) -> Tensor:
        """[B] what each sample weighs, from the record of all processes, one action a sample."""

    def kept(self, record: Record) -> Tensor | None:
        """[B] bool: the samples that are learned from, from the record of all processes; None: all."""
        return None

    def held(self, record: Record) -> Tensor | None:
        """[B] by which each sample's divergence from the start weights counts; None: alike."""
        return None

    def chosen(self, reward: Tensor, batch: Batch) -> Tensor | None:
        """[groups, M] the samples that stand for their group, from this process's rewards [B]; None: all of them."""
        return None

    def record(self, sampled: SampledPictures, processes: Processes) -> Record:
        """The record of all processes, one action a sample."""
        return record_of_samples(sampled, processes)

    def experience(self, sampled: SampledPictures, record: Record, processes: Processes) -> MatchingExperience:
        rollout, batch, scores, sampler = sampled.rollout, sampled.batch, sampled.scores, sampled.sampler
        counted, held = self.kept(record), self.held(record)
        metrics = score_metrics(scores, record.group, processes)
        begin = time.perf_counter()
        clean, guided, level_index = self.clean(sampler, batch, rollout.trajectory.final, **self.beside(rollout))
        metrics["seconds/levels"] = time.perf_counter() - begin
        credit = self.credit(record)
        check_shape(f"{type(self).__name__}.credit", credit, record.group.shape)
        advantage, rewards, group = (processes.own(all, len(batch)) for all in (credit, record.reward, record.group))
        return self.experience_type(
            batch=batch,
            metrics=metrics,
            items=self.item_numbers(batch, level_index.shape[1], processes.device),
            clean=clean,
            level_index=level_index,
            noise_seeds=self.noise_seeds(sampler, batch),
            advantage=advantage,
            reward=rewards,
            group=group,
            guided=guided,
            rollout=rollout,
            # where groups are not to have spread, rewards are only measured
            scores=scores if "refill" in self.combines else None,
            only_advantages=self.only_advantages,
            kept=None if counted is None else processes.own(counted, len(batch)),
            held=None if held is None else processes.own(held, len(batch)),
            chosen=self.chosen(rewards, batch),
        )

    def verify(self, policy: DiffusersPolicy, experience: MatchingExperience) -> None:
        assert experience.rollout is not None
        policy.verify(experience.rollout)

    def show(self, sampler: DiffusionSampler, scorer: Scorer, batch: Batch) -> Preview:
        rollout = self.sampled(sampler, batch)
        images = sampler.decode(rollout, shown=True)
        scores = scorer.score(images, batch)
        return Preview(rollout=rollout, batch=batch, images=images, scores=scores, reward=scores.value)
