"""CHORD: reinforcement and imitation in one loss, (1 - mu) RL + mu SFT (arXiv 2508.11408).

Loss: GRPO's, and the negative log-likelihood of a demonstration of each prompt, a token of probability p weighted by
p (1 - p) (CHORD-phi) or not at all (CHORD-mu). mu is constant, or rises to a peak and falls to a valley by a cosine.

The authors' code (chord_policy_loss.py in Trinity-RFT) was read: mu, its schedule and its defaults, the weight and the
mean over demonstrated tokens are theirs. Departures: they draw their demonstrations apart from the prompts, here each
prompt brings its own, in the data's metadata; their mean is over a micro-batch's tokens, here over the iteration's;
their cap on the probability up to which a token is imitated, off by default, is left out.
"""

from typing import Annotated, Literal

import torch
from pydantic import Field

from flowalign.algorithms.policy_gradient import ActionExperience
from flowalign.algorithms.text import base as language
from flowalign.algorithms.text.demonstrations import demonstrations, first_rows
from flowalign.algorithms.text.imitating import Examples, Imitating
from flowalign.core.imitation import imitation_share
from flowalign.policies.language.decoding import Decoding
from flowalign.policies.language.teacher_forcing import scored
from flowalign.rollouts.language import SampledTexts

Share = Annotated[float, Field(ge=0, le=1)]


class CHORDSettings(language.LanguageSettings):
    demonstration: str = "demonstration"
    """Key of the metadata with the demonstration."""
    weighting: Literal["chord", "none"] = "chord"
    """chord: weight p (1 - p) of every token."""
    peak: Share = 0.1
    valley: Share = 0.1
    """Highest and lowest mu."""
    warmup: int = Field(0, ge=0)
    """Iterations from 0 to the peak."""
    decay: int = Field(0, ge=0)
    """Iterations from the peak to the valley."""


class CHORD(Imitating):
    """CHORD: imitation of demonstrations mixed into GRPO with a weight that changes (arXiv 2508.11408)."""

    name = "chord"
    Settings = CHORDSettings
    settings: CHORDSettings
    takes_turns = False

    def __init__(self, settings: CHORDSettings) -> None:
        super().__init__(settings)
        self.weighting = settings.weighting

    def examples(self, sampled: SampledTexts, experience: ActionExperience) -> Examples:
        s, batch = self.settings, experience.batch
        rows = first_rows(batch)
        share = imitation_share(batch.iteration, s.warmup, s.decay, s.peak, s.valley)
        texts = demonstrations(batch, rows, s.demonstration)
        sampler, sampling = sampled.sampler, sampled.sampler.config.rollout
        there, rule = batch[rows], Decoding.of(sampling)
        rollout = scored(sampler.policy, there.prompts, texts, rule, sampling.batch_size, there.metadata)
        learned = torch.ones(len(rows), dtype=torch.bool, device=sampler.device)
        return Examples(rollout=rollout, counts=learned, own=1 - share, imitated=share)
