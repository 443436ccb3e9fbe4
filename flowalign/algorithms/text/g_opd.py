"""G-OPD: on-policy distillation as a reward of every token, as far as the teacher and beyond (arXiv 2602.12125).

Credit: lambda (log teacher - log ref) - (log pi - log ref) of each token under the weights that sampled it; lambda 1 is
plain on-policy distillation, above 1 extrapolates away from the reference: the start weights, or another model, such as
the one that the teacher was trained from, which corrects the reward where the student is smaller. `reward_weight` adds
the advantage of the rewards, which the authors do without. Loss: GRPO's.
"""

import torch
from pydantic import Field

from flowalign.algorithms.policy_gradient import ActionExperience
from flowalign.algorithms.text import base as language
from flowalign.core.imitation import distillation_advantage
from flowalign.core.record import Record, masked_mean
from flowalign.policies.language.teacher import Teacher
from flowalign.rollouts.language import SampledTexts
from flowalign.rollouts.processes import Processes


class GOPDSettings(language.LanguageSettings):
    teacher: str
    """Folder or hub name of a model of the same tokens."""
    extrapolation: float = Field(1.0, gt=0)
    """Weight lambda of the teacher's log-ratio to the reference; 1 is distillation, more extrapolates."""
    reference: str | None = None
    """Folder or hub name of a model of the same tokens; default the start weights."""
    reward_weight: float = Field(0.0, ge=0)


class GOPD(language.LanguageAlgorithm):
    """G-OPD: every token is rewarded by how much more probable a teacher finds it (arXiv 2602.12125)."""

    name = "g_opd"
    Settings = GOPDSettings
    settings: GOPDSettings
    teacher: Teacher | None = None
    reference: Teacher | None = None

    @property
    def uses_reference(self) -> bool:
        s = self.settings
        return super().uses_reference or (s.extrapolation != 1 and s.reference is None)

    def experience(self, sampled: SampledTexts, record: Record, processes: Processes) -> ActionExperience:
        experience = super().experience(sampled, record, processes)
        s, rollout, policy = self.settings, experience.rollout, sampled.sampler.policy
        size = sampled.sampler.config.rollout.batch_size
        self.teacher = self.teacher or Teacher(s.teacher, policy)
        teacher = self.teacher.log_probs(rollout, size)
        reference = None
        if s.extrapolation != 1 and s.reference is not None:
            self.reference = self.reference or Teacher(s.reference, policy)
            reference = self.reference.log_probs(rollout, size)
        elif s.extrapolation != 1:
            rows = torch.arange(len(rollout), device=processes.device).split(size)
            with torch.no_grad(), policy.reference():
                reference = torch.cat([policy.log_probs(rollout, chunk)[0] for chunk in rows])
        distilled = distillation_advantage(rollout.log_prob, teacher, reference, s.extrapolation)
        experience.advantage = (s.reward_weight * experience.advantage + distilled).where(rollout.mask, 0)
        gap = masked_mean(rollout.log_prob - teacher, rollout.mask)
        experience.metrics["policy/teacher_kl"] = processes.gather(gap).mean().item()
        return experience
