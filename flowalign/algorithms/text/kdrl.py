"""KDRL: reinforcement with a divergence from a teacher on the policy's own texts (arXiv 2506.02208).

Loss: GRPO's, the mean over all tokens, plus the k2 estimate of KL(policy || teacher) (eq. 8), with a coefficient that
may fall in a straight line over training; from 5e-3 to 1e-3 was best there. Reward-guided, right texts are left to the
reward alone.

The paper's own text was not at hand and no code was published; this follows its abstract and two accounts of its
sections 3.1 to 3.4, which agree. Departures: there each update has texts of its own; reward-guided, the divergence is
there the mean over the texts that it is left for, here over all; masking groups with a right text whole is left out.
"""

from pydantic import Field
from torch import Tensor

from flowalign.algorithms.policy_gradient import ActionExperience
from flowalign.algorithms.text import base as language
from flowalign.core.divergences import KLEstimate
from flowalign.core.imitation import annealed, distillation_loss
from flowalign.core.record import Actions, Record
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.teacher import Teacher
from flowalign.rollouts.language import SampledTexts
from flowalign.rollouts.processes import Processes


class KDRLSettings(language.LanguageSettings):
    teacher: str
    """Folder or hub name of a model of the same tokens."""
    distillation: float = Field(0.002, ge=0)
    """Coefficient of the divergence, at the beginning."""
    final_distillation: float | None = Field(None, ge=0)
    """The same coefficient at the end of training; default: unchanged."""
    distillation_estimate: KLEstimate = "k2"
    reward_guided: bool = False
    """Whether texts whose reward is above 1/2 are left out of distillation."""


class KDRL(language.LanguageAlgorithm):
    """KDRL: GRPO with the divergence from a teacher in its loss (arXiv 2506.02208)."""

    name = "kdrl"
    Settings = KDRLSettings
    settings: KDRLSettings
    teacher: Teacher | None = None
    done = 0.0

    def progress(self, done: float) -> None:
        self.done = done

    @property
    def coefficient(self) -> float:
        """Current coefficient of the divergence."""
        first, last = self.settings.distillation, self.settings.final_distillation
        return first if last is None else annealed(self.done, first, last)

    def experience(self, sampled: SampledTexts, record: Record, processes: Processes) -> ActionExperience:
        experience = super().experience(sampled, record, processes)
        self.teacher = self.teacher or Teacher(self.settings.teacher, sampled.sampler.policy)
        experience.teacher = self.teacher.log_probs(experience.rollout, sampled.sampler.config.rollout.batch_size)
        experience.all_teach = True
        return experience

    def penalties(
        self, policy: LanguagePolicy, experience: ActionExperience, rows: Tensor, tokens: Actions
    ) -> dict[str, tuple[float, Tensor]]:
        assert experience.teacher is not None
        reward = experience.reward[rows] if self.settings.reward_guided else None
        estimate = self.settings.distillation_estimate
        divergence = distillation_loss(tokens.log_prob, experience.teacher[rows], reward, estimate)
        penalties = super().penalties(policy, experience, rows, tokens)
        return penalties | {"policy/teacher_kl": (self.coefficient, divergence)}
