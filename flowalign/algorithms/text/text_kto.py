"""KTO: a language model learns from completions that are each good or bad, without pairs (arXiv 2402.01306).

Loss: w (1 - sigmoid(+-beta (gain - KL))). The gain is a completion's log-ratio to the reference; the KL is estimated by
the mean gain of completions beside the prompts of other lines, at least 0.

Departure: the KL is estimated once an iteration on all its lines, and not in every micro-batch, so that it is the same
however an iteration is divided.
"""

from dataclasses import dataclass, replace

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms import base
from flowalign.algorithms.text.lines import (
    LineExperience,
    LineLearning,
    SampledLines,
    completions,
    line_numbers,
    reference_log_probs,
    text_log_probs,
)
from flowalign.config import Data
from flowalign.core.preferences import label_loss
from flowalign.core.record import masked_sum
from flowalign.data import Prompts
from flowalign.data.batches import Batch
from flowalign.data.texts import TextLabels
from flowalign.errors import ConfigError
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.rollouts.language import LanguageSampler
from flowalign.rollouts.processes import Processes


class TextKTOSettings(base.AlgorithmSettings):
    beta: float = Field(0.1, gt=0)
    """Factor of the gains."""
    good_weight: float = Field(1.0, ge=0)
    """Weight of good completions' losses."""
    bad_weight: float = Field(1.0, ge=0)
    """Weight of bad completions' losses."""


@dataclass(kw_only=True)
class LabelExperience(LineExperience):
    reference: Tensor
    """[B] log-probabilities of the completions under the start weights."""
    good: Tensor
    """[B] bool labels of the completions."""
    divergence: Tensor
    """Estimate of the KL from the reference, a single number."""


class TextKTO(LineLearning):
    """KTO for language models: completions that are each labelled good or bad, without pairs (arXiv 2402.01306)."""

    name = "text_kto"
    Settings = TextKTOSettings
    settings: TextKTOSettings
    headline = "kto/accuracy"
    lines = TextLabels
    uses_reference = True

    def read(self, data: Data) -> Prompts:
        labels = super().read(data)
        kinds = {record["label"] for record in labels.metadata}
        if len(kinds) == 1:
            raise ConfigError(
                f"data.prompts: all labels are {str(kinds.pop()).lower()}, and kto compares; text_sft learns from good "
                "completions alone"
            )
        return labels

    def experience(self, sampled: SampledLines, record: None, processes: Processes) -> LabelExperience:
        batch, sampler = sampled.batch, sampled.sampler
        rollout = completions(sampler, batch, ["completion"])
        gain = processes.gather(mismatched_gain(sampler, batch))
        divergence = gain.mean().clamp(min=0)
        return LabelExperience(
            batch=batch,
            metrics={"kto/divergence": divergence.item()},
            items=line_numbers(batch, processes.device),
            rollout=rollout,
            reference=reference_log_probs(sampler, rollout),
            good=torch.tensor([line["label"] for line in batch.metadata], device=processes.device),
            divergence=divergence,
        )

    def losses(
        self, policy: LanguagePolicy, experience: LineExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(experience, LabelExperience)
        rows = items[:, 0]
        log_prob = policy.log_probs(experience.rollout, rows)[0]
        gain = masked_sum(log_prob, experience.rollout.mask[rows]) - experience.reference[rows]
        good = experience.good[rows]
        weight = torch.where(good, self.settings.good_weight, self.settings.bad_weight)
        losses = weight * label_loss(gain, good, experience.divergence, self.settings.beta)
        apart = torch.where(good, 1, -1) * (gain - experience.divergence).detach()
        return losses, {"kto/accuracy": (apart > 0).float() + (apart == 0) / 2, "kto/gain": gain.detach()}


def mismatched_gain(sampler: LanguageSampler, batch: Batch) -> Tensor:
    """[B] gains of the completions, each beside the prompt of the line after its own."""
    following = [*batch.metadata[-1:], *batch.metadata[:-1]]
    lines = zip(batch.metadata, following, strict=True)
    others = replace(batch, metadata=[line | {"completion": other["completion"]} for line, other in lines])
    rollout = completions(sampler, others, ["completion"])
    current = text_log_probs(sampler.policy, rollout, sampler.config.rollout.batch_size)
    return current - reference_log_probs(sampler, rollout)
