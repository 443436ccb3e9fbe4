"""Distribution matching: a few-step generator's samples, diffused, are moved from their own score to the teacher's.

Two sets of weights: the generator, which is the policy, and `fake`, which learns the velocity of what the generator
makes. The teacher is the start weights, under guidance. From a state x of one of its steps the generator predicts x0;
diffused to a level, `fake` and the teacher predict x0 there, and the generator's x0 moves along their difference,
over the mean size of its own distance from the teacher's. A method says how x0 is diffused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from pydantic import Field
from torch import Generator, Tensor

from flowalign.algorithms.matching import base
from flowalign.algorithms.matching.online import OnlineMatching, OnlineSettings
from flowalign.config import Named
from flowalign.core.divergences import velocity_mse
from flowalign.core.record import Record
from flowalign.data.batches import Batch
from flowalign.policies.diffusion import CleanSamples, DiffusersPolicy, Noised
from flowalign.policies.settings import Role
from flowalign.rollouts.pictures import DiffusionSampler, SampledPictures
from flowalign.rollouts.processes import Processes
from samplers import derive_seed


class DistributionSettings(OnlineSettings):
    levels: Named = Named(name="uniform", count=2, low=0.02, high=0.98)
    """Levels to diffuse to, one for each of `count` drawn steps of the generator; `flowalign list levels`."""
    reference_guidance: float | None = Field(4.5, ge=1)
    """Classifier-free scale of the teacher."""
    fake: Role = Role()
    """Optimizer of the generator's own score."""
    fake_to_teacher: float = Field(0.0, ge=0)
    """Weight of the mean squared difference between its velocity and the unguided teacher's, in its loss."""


@dataclass(kw_only=True)
class DistributionExperience(base.MatchingExperience):
    generator: CleanSamples | None = None
    """Conditions of the generator, at its steps."""
    steps: Tensor | None = None
    """[B, L] the generator's steps to learn from, one for each level."""

    def states(self, items: Tensor) -> Noised:
        """The generator's states at the steps of these items, as noised samples of what it predicted there."""
        assert self.rollout is not None and self.generator is not None and self.steps is not None
        samples, trajectory = self.members(items), self.rollout.trajectory
        steps = self.steps[samples, self.places(items)]
        return self.generator.at_states(
            samples, steps, trajectory.latents[samples, steps], trajectory.velocity[samples, steps]
        )


class DistributionMatching(OnlineMatching):
    """Base of the methods that distil into few steps."""

    Settings = DistributionSettings
    settings: DistributionSettings
    compares = frozenset({"reference"})
    combines = OnlineMatching.combines - {"search", "refill"}
    experience_type = DistributionExperience

    @property
    def roles(self) -> Mapping[str, Role]:
        return {"fake": self.settings.fake}

    def credit(self, record: Record) -> Tensor:
        return torch.zeros_like(record.reward)

    def steps(self, sampler: DiffusionSampler, batch: Batch) -> Tensor:
        """[B, L] different steps of the generator, in random order; the same for all of an iteration."""
        count, seed = self.level_count(sampler.config), derive_seed(sampler.config.training.seed, batch.iteration, 7)
        order = torch.randperm(sampler.config.rollout.steps, generator=Generator().manual_seed(seed))
        return order.repeat(-(-count // len(order)))[:count].expand(len(batch), -1)

    def experience(self, sampled: SampledPictures, record: Record, processes: Processes) -> base.MatchingExperience:
        experience = super().experience(sampled, record, processes)
        assert isinstance(experience, DistributionExperience)
        experience.steps = self.steps(sampled.sampler, experience.batch).to(processes.device)
        guidance = experience.clean.guidance[0]
        experience.generator = self.conditioned(sampled.sampler, experience.batch, experience.clean.x0, guidance)
        return experience

    def redrawn(self, experience: base.MatchingExperience, number: int) -> base.MatchingExperience:
        """Fresh noise, and levels of another sample: `fake` must not have learned at the points where it is used."""
        seeds = [derive_seed(seed, number, 11) for seed in experience.noise_seeds]
        # of its group, which is whole on a process
        groups = experience.level_index.unflatten(0, (len(set(experience.batch.group)), -1))
        return replace(experience, noise_seeds=seeds, level_index=groups.roll(number + 1, 1).flatten(0, 1))

    def diffused(self, experience: DistributionExperience, items: Tensor, state: Noised, x0: Tensor) -> Noised:
        """The generator's predictions at its states, [N, ...], noised to the levels of the items; here afresh."""
        return replace(experience.noised(items), x0=x0)

    def role_losses(
        self, role: str, policy: DiffusersPolicy, experience: base.MatchingExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(experience, DistributionExperience)
        state = experience.states(items)
        noised = self.diffused(experience, items, state, state.x0)
        velocity = policy.velocity_of(experience.clean, noised).float()
        loss = error = noised.error(velocity)
        if self.settings.fake_to_teacher:
            with torch.no_grad(), policy.reference():
                teacher = policy.velocity_of(experience.clean, noised).float()
            loss = error + self.settings.fake_to_teacher * velocity_mse(velocity, teacher)
        return base.by_item(loss, items), {"fake/error": base.by_item(error, items)}

    def losses(
        self, policy: DiffusersPolicy, experience: base.MatchingExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(experience, DistributionExperience) and experience.generator is not None
        state = experience.states(items)
        x0 = state.clean(policy.velocity_of(experience.generator, state).float())
        return self.distilled(policy, experience, self.diffused(experience, items, state, x0.detach()), x0)

    def distilled(
        self, policy: DiffusersPolicy, experience: DistributionExperience, noised: Noised, x0: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """[N] losses of what the generator predicts, [N, ...], which is asked about where it is noised."""
        fake, teacher = self.asked(policy, experience, noised)
        loss = towards(x0, x0.detach() + teacher - fake, teacher)
        return loss, {"distillation/gap": (teacher - fake).square().flatten(1).mean(1)}

    @staticmethod
    @torch.no_grad()
    def asked(policy: DiffusersPolicy, experience: DistributionExperience, noised: Noised) -> tuple[Tensor, Tensor]:
        """[N, ...] x0 that `fake` predicts at noised samples, and the guided teacher."""
        with policy.snapshot("fake"):
            fake = noised.clean(policy.velocity_of(experience.clean, noised).float())
        with policy.reference():
            teacher = noised.clean(policy.velocity_of(experience.guided or experience.clean, noised).float())
        return fake, teacher


def towards(x0: Tensor, target: Tensor, teacher: Tensor) -> Tensor:
    """[N] squared distances to a target, over the mean distance from the teacher's prediction (DMD, 2311.18828)."""
    weight = (x0.detach() - teacher).abs().flatten(1).mean(1).clamp(min=1e-5)
    return (target - x0).square().flatten(1).mean(1) / weight
