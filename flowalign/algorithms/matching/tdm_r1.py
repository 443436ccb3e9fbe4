"""TDM-R1: a few-step generator learns from any reward, through a surrogate (arXiv 2603.07700).

Four sets of weights on one network: the generator, which is the policy; `fake`, its score; `surrogate`, which learns
from whole groups, by DGPO's loss, what is rewarded at every step of a trajectory; and the teacher, the start weights.
The generator's prediction of x0 moves along three differences at what it is diffused to: the teacher's from the
fake's, the guided teacher's from the unguided, and, at a level of its own with one noise for a group, the surrogate's,
under its guidance, from the teacher's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from pydantic import Field
from torch import Generator, Tensor

from flowalign.algorithms.matching import base, distribution
from flowalign.algorithms.matching.along_ode import AlongODE
from flowalign.algorithms.matching.distribution import towards
from flowalign.algorithms.matching.surrogate import SurrogatePoints, SurrogateSettings
from flowalign.core.record import Record
from flowalign.policies.diffusion import CleanSamples, DiffusersPolicy, Noised
from flowalign.policies.settings import Role, Snapshot
from flowalign.rollouts.pictures import SampledPictures
from flowalign.rollouts.processes import Processes
from samplers import derive_seed


class TDMR1Settings(SurrogateSettings):
    fake_to_teacher: float = Field(0.02, ge=0)
    surrogate_guidance: float = Field(4.5, ge=1)
    """Classifier-free scale of the surrogate; published: 4.5 for OCR, 2.5 for GenEval, 3.5 for preference models."""
    least_rewarded: float = Field(0.3, ge=0, lt=0.95)
    """Noise level above which the generator is moved by the surrogate; published: 0.3, 0.55."""
    weights: tuple[float, float, float] = (1.0, 0.3, 0.7)
    """Weights of the three differences: score, guidance, reward."""
    rewarded_steps: int | None = Field(None, ge=1)
    """First steps that the reward moves; guidance alone moves the others; published: all, 2 of 4 for preferences."""


@dataclass(kw_only=True)
class TDMR1Experience(distribution.DistributionExperience):
    judged: SurrogatePoints | None = None
    """Samples and levels at which the surrogate learns."""
    rewarded: "TDMR1Experience | None" = None
    """The same samples at the levels where the surrogate moves the generator."""
    guided_surrogate: CleanSamples | None = None
    """Conditions of the guided surrogate at those levels."""


class TDMR1(AlongODE):
    """TDM-R1: a few-step generator, its score and a surrogate of the reward (arXiv 2603.07700)."""

    name = "tdm_r1"
    Settings = TDMR1Settings
    settings: TDMR1Settings
    experience_type = TDMR1Experience
    combines = AlongODE.combines | {"refill"}
    whole_groups = True

    def __init__(self, settings: TDMR1Settings) -> None:
        super().__init__(settings)
        self.advantage_of = settings.advantage.part("advantages", "algorithm.advantage")

    @property
    def roles(self) -> Mapping[str, Role]:
        return {"fake": self.settings.fake, "surrogate": self.settings.surrogate}

    @property
    def snapshots(self) -> Mapping[str, Snapshot]:
        return {"slow": self.settings.slow}

    def credit(self, record: Record) -> Tensor:
        advantage: Tensor = self.advantage_of(record)
        return advantage if record.confidence is None else advantage * record.confidence

    def experience(self, sampled: SampledPictures, record: Record, processes: Processes) -> base.MatchingExperience:
        experience = super().experience(sampled, record, processes)
        assert isinstance(experience, TDMR1Experience)
        batch, x0, sampler = experience.batch, experience.clean.x0, sampled.sampler
        seed = derive_seed(sampler.config.training.seed, batch.iteration, 8)
        # later steps are judged more often, in proportion to their number
        chances = torch.arange(1.0, sampler.config.rollout.steps + 1)
        count = self.level_count(sampler.config)
        steps = torch.multinomial(chances, count, replacement=True, generator=Generator().manual_seed(seed))
        drawn = self.above(sampler, batch, steps.expand(len(batch), -1), seed, self.settings.least_judged)
        clean, level_index = self.at_levels(sampler, batch, x0, drawn, self.guidance(sampler))
        experience.judged = SurrogatePoints(clean, level_index, steps.to(processes.device).expand(len(batch), -1))

        seed = derive_seed(sampler.config.training.seed, batch.iteration, 12)
        drawn = self.above(sampler, batch, self.steps(sampler, batch), seed, self.settings.least_rewarded)
        clean, level_index = self.at_levels(sampler, batch, x0, drawn, self.guidance(sampler))
        experience.guided_surrogate, _ = self.at_levels(sampler, batch, x0, drawn, self.settings.surrogate_guidance)
        seeds = [derive_seed(seed, group) for group in batch.group]
        experience.rewarded = replace(experience, clean=clean, level_index=level_index, noise_seeds=seeds)
        return experience

    def role_losses(
        self, role: str, policy: DiffusersPolicy, experience: base.MatchingExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(experience, TDMR1Experience)
        if role == "fake":
            return super().role_losses(role, policy, experience, items)
        assert experience.judged is not None
        loss, values = experience.judged.losses(policy, experience, items, self.settings)
        return base.by_item(loss, items), {name: base.by_item(value, items) for name, value in values.items()}

    def losses(
        self, policy: DiffusersPolicy, experience: base.MatchingExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(experience, TDMR1Experience) and experience.generator is not None
        assert experience.rewarded is not None and experience.guided_surrogate is not None
        state, settings = experience.states(items), self.settings
        x0 = state.clean(policy.velocity_of(experience.generator, state).float())
        start = x0.detach()
        noised = self.diffused(experience, items, state, start)
        again = self.diffused(experience.rewarded, items, state, start)

        def predicted(clean: CleanSamples, at: Noised = noised) -> Tensor:
            return at.clean(policy.velocity_of(clean, at).float())

        with torch.no_grad():
            with policy.snapshot("fake"):
                fake = predicted(experience.clean)
            with policy.reference():
                teacher, guided = predicted(experience.clean), predicted(experience.guided or experience.clean)
                plain = predicted(experience.rewarded.clean, again)
            with policy.snapshot("surrogate"):
                surrogate = predicted(experience.guided_surrogate, again)
        score = towards(x0, start + teacher - fake, guided)
        guidance = towards(x0, start + guided - teacher, guided)
        reward = towards(x0, start + surrogate - plain, surrogate)
        score_weight, guidance_weight, reward_weight = settings.weights
        loss = score_weight * score + guidance_weight * guidance + reward_weight * reward
        if settings.rewarded_steps is not None:
            loss = torch.where(state.level_index < settings.rewarded_steps, loss, guidance_weight * (score + guidance))
        gap = (surrogate - plain).square().flatten(1).mean(1)
        return base.by_item(loss, items), {"distillation/reward_gap": base.by_item(gap, items)}
