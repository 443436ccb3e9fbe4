"""On-policy distillation: the student's own states, the teacher's step there (DiffusionOPD, arXiv 2605.15055).

The student samples, and at each of its states its step is drawn to the teacher's: ||mu - mu_teacher||^2 / 2, over the
variance too where steps are stochastic; `weight: velocity` takes the mean squared difference of the velocities. A
teacher is the start weights under another guidance, or another pipeline for the same latents and prompts; of several,
a prompt has the first whose `where` it meets.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms.matching import base
from flowalign.algorithms.matching.online import OnlineMatching, OnlineSettings
from flowalign.config import Config
from flowalign.core.divergences import velocity_mse
from flowalign.core.record import Record
from flowalign.data import shipped
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import CleanSamples, DiffusersPolicy, Noised
from flowalign.rollouts.pictures import SampledPictures
from flowalign.rollouts.processes import Processes
from flowalign.settings import Section


class TeacherSettings(Section):
    path: str | None = None
    """A folder, hub name or shipped model; default: the start weights."""
    lora: str | None = None
    """a LoRA of that model: a file or a folder"""
    guidance: float = Field(1.0, ge=1)
    where: dict[str, list[str]] = {}
    """Metadata of the prompts that it teaches; default: all prompts."""


class OPDSettings(OnlineSettings):
    teachers: list[TeacherSettings] = Field(min_length=1)
    weight: Literal["step", "velocity"] = "step"
    """Quantity that is compared: steps, or velocities."""


@dataclass(kw_only=True)
class OPDExperience(base.MatchingExperience):
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


class OPD(OnlineMatching):
    """On-policy distillation from one or several teachers, at the student's own states (arXiv 2605.15055)."""

    name = "opd"
    Settings = OPDSettings
    settings: OPDSettings
    combines = OnlineMatching.combines - {"search", "refill"}
    experience_type = OPDExperience

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
        self.networks: list[DiffusersPolicy | None] = []
        for teacher in self.settings.teachers:
            network = None
            if teacher.path is not None:
                network = DiffusersPolicy.from_pretrained(shipped(teacher.path), policy.dtype, policy.device)
                if teacher.lora is not None:
                    network.load(teacher.lora)
            self.networks.append(network)
        return {}

    def experience(self, sampled: SampledPictures, record: Record, processes: Processes) -> base.MatchingExperience:
        experience = super().experience(sampled, record, processes)
        assert isinstance(experience, OPDExperience) and experience.rollout is not None
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
        assert isinstance(experience, OPDExperience)
        points = super().points(policy, experience, items)
        taught = torch.empty_like(points.velocity)
        for number, (lesson, network) in enumerate(zip(experience.lessons, self.networks, strict=True)):
            rows = (experience.owner[points.noised.samples] == number).nonzero().squeeze(1)
            if len(rows):
                noised = points.noised[rows]
                with torch.no_grad():
                    if network is None:
                        with policy.reference():
                            taught[rows] = policy.velocity_of(lesson, noised).float()
                    else:
                        taught[rows] = network.velocity_of(lesson, noised).float()
                        policy.forwards, network.forwards = policy.forwards + network.forwards, 0
        points.taught = taught
        return points

    def loss(self, points: base.Points) -> tuple[Tensor, dict[str, Tensor]]:
        assert points.taught is not None and points.rollout is not None
        gap = velocity_mse(points.velocity, points.taught)
        if self.settings.weight == "velocity":
            return gap, {"distillation/gap": gap}
        rollout, at = points.rollout, (points.noised.samples, points.noised.level_index)
        step, taught = (rollout.trajectory.score(rollout.kernel, v, *at) for v in (points.velocity, points.taught))
        variance = torch.where(step.std > 0, step.std**2, 1)
        return ((step.mean - taught.mean) ** 2 / (2 * variance)).flatten(1).mean(1), {"distillation/gap": gap}
