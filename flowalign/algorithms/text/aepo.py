"""AEPO: the policy's entropy held at a target (arXiv 2510.08141, and the authors' code).

Rollout: one more text of each prompt, sampled at a high temperature while the entropy is below its target and at a
low one while above. Loss: GRPO's, plus `coefficient` times REINFORCE with advantage 1 on such texts whose
advantage in their group is above 0.05: right ones, where not all are. Above the target the coefficient is half.

Departures: the authors sample a quarter of the prompts as often as a group is large, take the advantage among these
texts alone, and let the first 60 chosen ones, above the target half of them, take the place of other texts in the
batch. One text a prompt has no group of its own, so that it joins the prompt's; and half of the coefficient is half of
the texts on average.
"""

import torch
from pydantic import Field

from flowalign.algorithms.policy_gradient import ActionExperience
from flowalign.algorithms.text import base as language
from flowalign.algorithms.text.demonstrations import first_rows
from flowalign.algorithms.text.imitating import Examples, Imitating
from flowalign.core.entropy import regulating_temperature
from flowalign.policies.language.decoding import Decoding
from flowalign.policies.language.teacher_forcing import rescored
from flowalign.rollouts.language import SampledTexts

LEAST = 0.05


class AEPOSettings(language.LanguageSettings):
    entropy: float = Field(0.5, ge=0)
    """Target, in nats a token."""
    high: float = Field(1.2, gt=0)
    low: float = Field(0.8, gt=0)
    """Temperatures of the further texts."""
    coefficient: float = Field(0.25, ge=0)
    """Coefficient of their loss, while the entropy is below its target; half above."""


class AEPO(Imitating):
    """AEPO: right texts of another temperature are imitated to hold the entropy at a target (arXiv 2510.08141)."""

    name = "aepo"
    Settings = AEPOSettings
    settings: AEPOSettings

    def examples(self, sampled: SampledTexts, experience: ActionExperience) -> Examples:
        s, batch, sampler = self.settings, experience.batch, sampled.sampler
        sampling, policy = sampler.config.rollout, sampler.policy
        rows = first_rows(batch)
        entropy = experience.metrics["text/entropy"]
        temperature = regulating_temperature(entropy, s.entropy, s.high, s.low)
        further = policy.sample(
            [batch.prompts[row] for row in rows],
            # of the start noise, which texts have none of: other draws than the samples'
            [batch.seeds[row] for row in rows],
            metadata=[batch.metadata[row] for row in rows],
            **sampling.arguments() | {"temperature": temperature},
        )
        value = sampled.scorer.score(policy.decode(further), batch, rows).value
        group = torch.cat([experience.scores.value.view(len(rows), -1), value[:, None]], 1)
        advantage = (value - group.mean(1)) / (group.std(1) + 1e-6)
        rollout = rescored(policy, further, sampling.batch_size, Decoding.of(sampling))
        experience.metrics["text/regulating_temperature"] = temperature
        coefficient = s.coefficient if entropy <= s.entropy else s.coefficient / 2
        return Examples(rollout=rollout, counts=(advantage > LEAST).to(sampler.device), own=1.0, imitated=coefficient)
