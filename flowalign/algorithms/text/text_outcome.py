"""Outcome reward modelling with log-ratios: an implicit process reward model (arXiv 2412.01981, eq. 5).

Loss: cross-entropy of sigmoid(beta * gain) with whether a completion is right; its gain is the log-ratio to the
reference, a sum over tokens. What a prefix gained is its value, so that the reward `implicit_prm` reads process rewards
out of the result: `model` is the run's, `reference` the start's. `text_dpo` is the paper's other way to such a model.
"""

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from flowalign.algorithms import base
from flowalign.algorithms.text.lines import (
    LineExperience,
    LineLearning,
    SampledLines,
    completions,
    line_numbers,
    reference_log_probs,
)
from flowalign.core.record import masked_sum
from flowalign.data.texts import TextLabels
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.rollouts.processes import Processes


class TextOutcomeSettings(base.AlgorithmSettings):
    beta: float = Field(0.05, gt=0)
    """Factor of the gains; `implicit_prm` takes the same."""


@dataclass(kw_only=True)
class OutcomeExperience(LineExperience):
    reference: Tensor
    """[B] log-probabilities of the completions under the start weights."""
    right: Tensor
    """[B] float, 1 of right completions and 0 of wrong ones."""


class TextOutcome(LineLearning):
    """An implicit process reward model, trained on completions that are right or wrong (arXiv 2412.01981)."""

    name = "text_outcome"
    Settings = TextOutcomeSettings
    settings: TextOutcomeSettings
    headline = "outcome/accuracy"
    lines = TextLabels
    uses_reference = True

    def experience(self, sampled: SampledLines, record: None, processes: Processes) -> OutcomeExperience:
        batch = sampled.batch
        rollout = completions(sampled.sampler, batch, ["completion"])
        labels = [float(line["label"]) for line in batch.metadata]
        return OutcomeExperience(
            batch=batch,
            metrics={},
            items=line_numbers(batch, processes.device),
            rollout=rollout,
            reference=reference_log_probs(sampled.sampler, rollout),
            right=torch.tensor(labels, device=processes.device),
        )

    def losses(
        self, policy: LanguagePolicy, experience: LineExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(experience, OutcomeExperience)
        rows = items[:, 0]
        log_prob = policy.log_probs(experience.rollout, rows)[0]
        logit = self.settings.beta * (masked_sum(log_prob, experience.rollout.mask[rows]) - experience.reference[rows])
        right = experience.right[rows]
        losses = F.binary_cross_entropy_with_logits(logit, right, reduction="none")
        apart = torch.where(right > 0.5, logit, -logit).detach()
        return losses, {"outcome/accuracy": (apart > 0).float() + (apart == 0) / 2, "outcome/logit": logit.detach()}
