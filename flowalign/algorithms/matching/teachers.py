"""Distillation at the student's own states from one or several teachers, each for its prompts.

A teacher is the start weights under another guidance, or another pipeline for the same latents and prompts; of several,
a prompt has the first whose `where` it meets.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms.matching import base
from flowalign.algorithms.matching.online import OnlineMatching, OnlineSettings
from flowalign.config import Config
from flowalign.core.record import Record
from flowalign.data import shipped
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import CleanSamples, DiffusersPolicy, Noised
from flowalign.rollouts.pictures import SampledPictures
from flowalign.rollouts.processes import Processes
from flowalign.settings import Section
from samplers import Transition


class NetworkSettings(Section):
    path: str | None = None
    """A folder, hub name or shipped model; default: the start weights."""
    lora: str | None = None
    """LoRA of that model: a file or a folder."""

    def load(self, policy: DiffusersPolicy) -> DiffusersPolicy | None:
        """The other pipeline, None for the start weights."""
        if self.path is None:
            return None
        network = DiffusersPolicy.from_pretrained(shipped(self.path), policy.dtype, policy.device)
        if self.lora is not None:
            network.load(self.lora)
        return network


class TeacherSettings(NetworkSettings):
    guidance: float = Field(1.0, ge=1)
    where: dict[str, list[str]] = {}
    """Metadata of the prompts that it teaches; default: all prompts."""


class TaughtSettings(OnlineSettings):
    teachers: list[TeacherSettings] = Field(min_length=1)


@dataclass(kw_only=True)
class TaughtExperience(base.MatchingExperience):
    lessons: list[CleanSamples] = field(default_factory=list)
    """Conditions of each teacher's velocities."""
    owner: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    """[B] the number of each sample's teacher."""

    def noised(self, items: Tensor) -> Noised:
        assert self.rollout is not None
        samples = self.members(items)
        steps, trajectory = self.level_index[samples, items[:, 1]], self.rollout.trajectory
        return self.clean.at_states(
            samples, steps, trajectory.latents[samples, steps], trajectory.velocity[samples, steps]
        )


class TaughtMatching(OnlineMatching):
    """Base of the methods with teachers."""

    Settings = TaughtSettings
    settings: TaughtSettings
    combines = OnlineMatching.combines - {"search", "refill"}
    experience_type = TaughtExperience

    @property
    def uses_reference(self) -> bool:
        return super().uses_reference or any(teacher.path is None for teacher in self.settings.teachers)

    def check(self, config: Config) -> None:
        super().check(config)
        if self.settings.levels.name != "schedule":
            raise ConfigError("algorithm.levels: the student's own states are at its schedule's points; schedule works")
        for i, teacher in enumerate(self.settings.teachers):
            if teacher.path is None and (teacher.lora is not None or teacher.guidance == (self.settings.guidance or 1)):
                raise ConfigError(
                    f"algorithm.teachers.{i}: without a path it is the start weights, and teaches by its guidance; "
                    "path: ..., or guidance: 4.5"
                )

    def credit(self, record: Record) -> Tensor:
        return torch.zeros_like(record.reward)

    def modules(self, policy: DiffusersPolicy) -> dict[str, Any]:
        # loaded here, once the student is there
        self.networks = [teacher.load(policy) for teacher in self.settings.teachers]
        return {}

    def experience(self, sampled: SampledPictures, record: Record, processes: Processes) -> base.MatchingExperience:
        experience = super().experience(sampled, record, processes)
        assert isinstance(experience, TaughtExperience) and experience.rollout is not None
        batch, teachers = experience.batch, self.settings.teachers
        owner = [
            next((i for i, t in enumerate(teachers) if all(r.get(k) in v for k, v in t.where.items())), None)
            for r in batch.metadata
        ]
        if None in owner:
            prompt = batch.prompts[owner.index(None)]
            raise ConfigError(
                f"algorithm.teachers: none teaches the prompt {prompt!r}; one without 'where' takes the rest"
            )
        experience.owner = torch.tensor(owner, device=processes.device)
        experience.lessons = [
            self.conditioned(sampled.sampler, batch, experience.clean.x0, t.guidance) for t in teachers
        ]
        return experience

    def points(self, policy: DiffusersPolicy, experience: base.MatchingExperience, items: Tensor) -> base.Points:
        assert isinstance(experience, TaughtExperience)
        points = super().points(policy, experience, items)
        taught = torch.empty_like(points.velocity)
        for number, (lesson, network) in enumerate(zip(experience.lessons, self.networks, strict=True)):
            rows = (experience.owner[points.noised.samples] == number).nonzero().squeeze(1)
            if len(rows):
                taught[rows] = self.asked(policy, network, lesson, points.noised[rows])
        points.taught = taught
        return points

    @staticmethod
    @torch.no_grad()
    def asked(policy: DiffusersPolicy, network: DiffusersPolicy | None, lesson: CleanSamples, noised: Noised) -> Tensor:
        """[N, ...] velocities of another pipeline, or of the start weights."""
        if network is None:
            with policy.reference():
                return policy.velocity_of(lesson, noised).float()
        velocity = network.velocity_of(lesson, noised).float()
        policy.forwards, network.forwards = policy.forwards + network.forwards, 0
        return velocity

    @staticmethod
    def step(points: base.Points, velocity: Tensor) -> Transition:
        """The recorded step of each point, as this velocity [N, ...] makes it."""
        assert points.rollout is not None
        at = points.noised.samples, points.noised.level_index
        return points.rollout.trajectory.score(points.rollout.kernel, velocity, *at)
