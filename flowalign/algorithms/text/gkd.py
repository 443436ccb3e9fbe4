"""GKD: the whole distributions of a teacher, on texts of the policy's own or of the data (arXiv 2306.13649).

An iteration's texts are the policy's with the chance `on_policy`, else the data's completions. Loss: the divergence of
the policy's distribution from the teacher's at every token of a completion, a mean over all tokens. Distributions are
those of the rollout's decoding, as in TRL those of its temperature. Nothing is rewarded.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms import base
from flowalign.algorithms.text.lines import LineExperience, LineLearning, SampledLines, line_numbers, share_of_tokens
from flowalign.config import Data
from flowalign.core.distillation import DIVERGENCES
from flowalign.core.record import masked_mean, masked_sum
from flowalign.data import Prompts
from flowalign.data.texts import check_texts
from flowalign.policies.language.decoding import Decoding
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.teacher import Teacher
from flowalign.policies.language.teacher_forcing import demonstrated
from flowalign.rollouts.processes import Processes
from samplers import derive_seed

Share = Annotated[float, Field(ge=0, le=1)]


class GKDSettings(base.AlgorithmSettings):
    teacher: str
    """Folder or hub name of a model of the same tokens."""
    divergence: Literal["jsd", "tvd", "tvd++"] = "jsd"
    """jsd: generalised Jensen-Shannon, by `beta`; tvd: total variation, for a draft model; tvd++: with a baseline."""
    beta: Share = 0.5
    """0 is the forward KL, 1 the reverse."""
    on_policy: Share = 0.5
    """Chance that an iteration learns from texts of the policy's own (lmbda in TRL)."""
    completion: str = "completion"
    """Key of the data's completions."""


@dataclass(kw_only=True)
class Taught(LineExperience):
    factor: float
    """Factor of a completion's summed divergence."""


class GKD(LineLearning):
    """Generalised knowledge distillation: a teacher's whole distributions (arXiv 2306.13649)."""

    name = "gkd"
    Settings = GKDSettings
    settings: GKDSettings
    headline = "distillation/divergence"
    teacher: Teacher | None = None

    def read(self, data: Data) -> Prompts:
        prompts = super().read(data)
        for text, record in zip(prompts.texts, prompts.metadata, strict=True):
            if self.settings.on_policy < 1:
                check_texts(record, (self.settings.completion,), f"data.prompts, the prompt {text[:60]!r}")
        return prompts

    def experience(self, sampled: SampledLines, record: None, processes: Processes) -> Taught:
        batch, sampler = sampled.batch, sampled.sampler
        self.teacher = self.teacher or Teacher(self.settings.teacher, sampler.policy)
        # one choice for all processes
        seed = derive_seed(sampler.config.training.seed, batch.iteration, 11)
        own = torch.rand(1, generator=torch.Generator().manual_seed(seed)).item() < self.settings.on_policy
        if own:
            rollout = sampler.rollout(batch)
        else:
            texts = [str(line[self.settings.completion]) for line in batch.metadata]
            rule = Decoding.of(sampler.config.rollout)
            rollout = demonstrated(sampler.policy, batch.prompts, texts, batch.metadata, rule)
        items = line_numbers(batch, processes.device)
        factor = share_of_tokens(rollout, items[:, 0], processes)
        metrics = {"distillation/on_policy": float(own)}
        return Taught(batch=batch, metrics=metrics, items=items, rollout=rollout, factor=factor)

    def losses(
        self, policy: LanguagePolicy, experience: LineExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(experience, Taught) and self.teacher is not None
        rows, rollout = items[:, 0], experience.rollout
        mask, student = rollout.mask[rows], policy.distributions(rollout, rows)
        with torch.no_grad():
            teacher = self.teacher.policy.distributions(rollout, rows)
        each = DIVERGENCES[self.settings.divergence](student, teacher, self.settings.beta)
        divergence = torch.zeros(mask.shape, device=each.device).index_put(mask.nonzero(as_tuple=True), each)
        values = {"distillation/divergence": masked_mean(divergence.detach(), mask)}
        return experience.factor * masked_sum(divergence, mask), values
