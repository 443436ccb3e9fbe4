"""TDM-R1: a few-step generator learns from any reward, through a surrogate (arXiv 2603.07700).

Four sets of weights on one network: the generator, which is the policy; `fake`, its score; `surrogate`, which learns
from whole groups, by DGPO's loss, what is rewarded at every step of a trajectory; and the teacher, the start weights.
The generator's prediction of x0 moves along three differences at what it is diffused to: the teacher's from the
fake's, the guided teacher's from the unguided, and the surrogate's, under its guidance, from the teacher's.

Departures: the reward's difference is taken where the others are, not at a level of its own; the surrogate's levels
begin where a state's do, not at a least one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Generator, Tensor

from flowalign.actors.diffusion import DiffusionActor
from flowalign.actors.draw import Draw
from flowalign.algorithms.matching import base, distribution
from flowalign.algorithms.matching.along_ode import AlongODE
from flowalign.algorithms.matching.distribution import towards
from flowalign.algorithms.matching.surrogate import Judged
from flowalign.config import Named
from flowalign.core.record import Record
from flowalign.policies.diffusion import CleanSamples, DiffusersPolicy
from flowalign.policies.settings import Role, Snapshot
from samplers import derive_seed


class TDMR1Settings(distribution.DistributionSettings):
    advantage: Named = Named(name="grpo", scale="batch", clip=5.0)
    """`flowalign list advantages`, with its settings"""
    fake_to_teacher: float = Field(0.02, ge=0)
    surrogate: Role = Role()
    """how the surrogate is learned"""
    slow: Snapshot = Snapshot(decay="0-0.001-0.001-0.3", every="update", of="surrogate")
    """its average, from which it is kept"""
    beta: float = Field(1.0, gt=0)
    """how sharply a group's weight falls from 1 to 0"""
    clip_range: float = Field(1e-3, gt=0)
    """of a sample's ratio exp(e_slow - e); published: 0.001, 0.002 for preference models"""
    surrogate_kl: float = Field(1e-3, ge=0)
    """of the mean squared difference of the surrogate's and the teacher's velocities"""
    runaway: float = Field(0.05, gt=0)
    """mean of that difference above which samples that are ahead of the teacher have no gradient"""
    surrogate_guidance: float = Field(4.5, ge=1)
    """published: 4.5 for OCR, 2.5 for GenEval, 3.5 for preference models"""
    weights: tuple[float, float, float] = (1.0, 0.3, 0.7)
    """of the three differences: score, guidance, reward"""
    rewarded_steps: int | None = Field(None, ge=1)
    """steps of the generator from its first on that the reward moves; after them only guidance's weight counts;
    published: all, 2 of 4 for preference models"""


@dataclass
class Experience(distribution.Experience):
    judged: Judged | None = None
    """where the surrogate learns"""
    guided_surrogate: CleanSamples | None = None
    """what it is asked with when the generator learns"""


class TDMR1(AlongODE):
    """TDM-R1: a few-step generator, its score and a surrogate of the reward (arXiv 2603.07700)."""

    Settings = TDMR1Settings
    settings: TDMR1Settings
    experience = Experience
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
        return advantage if record.weight is None else advantage * record.weight

    def collect(self, actor: DiffusionActor, draw: Draw) -> base.Experience:
        experience = super().collect(actor, draw)
        assert isinstance(experience, Experience)
        batch, x0 = experience.batch, experience.clean.x0
        seed = derive_seed(actor.config.training.seed, batch.iteration, 8)
        # later steps are judged more often, in proportion to their number
        chances = torch.arange(1.0, actor.config.rollout.steps + 1)
        count = self.level_count(actor.config)
        steps = torch.multinomial(chances, count, replacement=True, generator=Generator().manual_seed(seed))
        drawn = self.above(actor, batch, steps.expand(len(batch), -1), seed)
        clean, levels = self.at_levels(actor, batch, x0, drawn, self.guidance(actor))
        experience.judged = Judged(clean, levels, steps.to(actor.device).expand(len(batch), -1))
        drawn = self.drawn_levels(actor, batch)
        experience.guided_surrogate, _ = self.at_levels(actor, batch, x0, drawn, self.settings.surrogate_guidance)
        return experience

    def role_losses(
        self, role: str, policy: DiffusersPolicy, experience: base.Experience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(experience, Experience)
        if role == "fake":
            return super().role_losses(role, policy, experience, items)
        settings = self.settings
        assert experience.judged is not None and experience.generator is not None
        loss, gap, values = experience.judged.losses(
            policy, experience, items, settings.beta, settings.clip_range, settings.runaway
        )
        return base.by_item(loss + settings.surrogate_kl * gap, items), {
            name: base.by_item(value, items) for name, value in values.items()
        }

    def losses(
        self, policy: DiffusersPolicy, experience: base.Experience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(experience, Experience) and experience.generator is not None
        assert experience.guided_surrogate is not None
        state, settings = experience.states(items), self.settings
        x0 = state.clean(policy.velocity_of(experience.generator, state).float())
        start = x0.detach()
        noised = self.diffused(experience, items, state, start)

        def predicted(clean: CleanSamples) -> Tensor:
            return noised.clean(policy.velocity_of(clean, noised).float())

        with torch.no_grad():
            with policy.snapshot("fake"):
                fake = predicted(experience.clean)
            with policy.reference():
                teacher, guided = predicted(experience.clean), predicted(experience.guided or experience.clean)
            with policy.snapshot("surrogate"):
                surrogate = predicted(experience.guided_surrogate)
        score = towards(x0, start + teacher - fake, guided)
        guidance = towards(x0, start + guided - teacher, guided)
        reward = towards(x0, start + surrogate - teacher, surrogate)
        score_weight, guidance_weight, reward_weight = settings.weights
        loss = score_weight * score + guidance_weight * guidance + reward_weight * reward
        if settings.rewarded_steps is not None:
            loss = torch.where(state.levels < settings.rewarded_steps, loss, guidance_weight * (score + guidance))
        gap = (surrogate - teacher).square().flatten(1).mean(1)
        return base.by_item(loss, items), {"distillation/reward_gap": base.by_item(gap, items)}
