"""ReLIFT: what is too hard to explore is learned from demonstrations (arXiv 2506.07527).

Loss: GRPO's, and the negative log-likelihood of the demonstrations of prompts whose group has no right text. Departure:
the authors collect such prompts, have them solved by a stronger model and learn them in a step of fine-tuning once
there are enough; here the demonstration is in the data's metadata and learned in the same update.
"""

from pydantic import Field

from flowalign.algorithms.policy_gradient import ActionExperience
from flowalign.algorithms.text import base as language
from flowalign.algorithms.text.demonstrations import demonstrations, first_rows
from flowalign.algorithms.text.imitating import Examples, Imitating
from flowalign.core.imitation import needs_demonstration
from flowalign.policies.language.decoding import Decoding
from flowalign.policies.language.teacher_forcing import scored
from flowalign.rollouts.language import SampledTexts


class ReLIFTSettings(language.LanguageSettings):
    demonstration: str = "demonstration"
    """Key of the metadata with the demonstration."""
    threshold: float = 0.0
    """Reward that no text of a group exceeds where the group is too hard."""
    coefficient: float = Field(1.0, ge=0)


class ReLIFT(Imitating):
    """ReLIFT: demonstrations of the prompts that no text of the group solves (arXiv 2506.07527)."""

    name = "relift"
    Settings = ReLIFTSettings
    settings: ReLIFTSettings
    takes_turns = False

    def examples(self, sampled: SampledTexts, experience: ActionExperience) -> Examples:
        s, batch = self.settings, experience.batch
        rows = first_rows(batch)
        hard = needs_demonstration(experience.reward, experience.group, s.threshold)[rows]
        texts = demonstrations(batch, rows, s.demonstration)
        sampler, sampling = sampled.sampler, sampled.sampler.config.rollout
        there, rule = batch[rows], Decoding.of(sampling)
        rollout = scored(sampler.policy, there.prompts, texts, rule, sampling.batch_size, there.metadata)
        return Examples(rollout=rollout, counts=hard, own=1.0, imitated=s.coefficient)
