"""AEPO: the policy's entropy held at a target (arXiv 2510.08141, and the authors' code).

Rollout: one more text of each prompt, sampled at a high temperature while the entropy is below its target and at a
low one while above. Loss: GRPO's, plus `coefficient` times REINFORCE with advantage 1 on such texts where they are
right (above 1/2). Departure: the authors sample a quarter of the prompts as often as a group is large, and let the
right ones take the place of other texts.
"""

from pydantic import Field

from flowalign.actors.language import LanguageActor
from flowalign.algorithms.policy_gradient import Experience
from flowalign.algorithms.text import base as language
from flowalign.algorithms.text.demonstrations import first_rows
from flowalign.algorithms.text.imitating import Examples, Imitating
from flowalign.core.entropy import regulating_temperature
from flowalign.policies.language.teacher_forcing import rescored


class AEPOSettings(language.LanguageSettings):
    entropy: float = Field(0.5, ge=0)
    """the target, nats a token"""
    high: float = Field(1.2, gt=0)
    low: float = Field(0.8, gt=0)
    """temperatures of the further texts"""
    coefficient: float = Field(0.25, ge=0)
    """of their loss"""


class AEPO(Imitating):
    """AEPO: right texts of another temperature are imitated to hold the entropy at a target (arXiv 2510.08141)."""

    Settings = AEPOSettings
    settings: AEPOSettings

    def examples(self, actor: LanguageActor, experience: Experience) -> Examples:
        s, batch, sampling = self.settings, experience.batch, actor.config.rollout
        rows = first_rows(batch)
        temperature = regulating_temperature(experience.metrics["text/entropy"], s.entropy, s.high, s.low)
        further = actor.policy.sample(
            [batch.prompts[row] for row in rows],
            # of the start noise, which texts have none of: other draws than the samples'
            [batch.seeds[row] for row in rows],
            metadata=[batch.metadata[row] for row in rows],
            **sampling.arguments() | {"temperature": temperature},
        )
        right = actor.score(actor.policy.decode(further), batch, rows).value.to(actor.device) > 0.5
        rollout = rescored(actor.policy, further, sampling.batch_size, sampling.temperature)
        experience.metrics["text/regulating_temperature"] = temperature
        return Examples(rollout, right, 1.0, s.coefficient)
