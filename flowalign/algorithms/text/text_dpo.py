"""Preference optimisation of a language model on pairs of completions of the data: DPO and its relatives by name.

Loss: `loss`, one of `core.preferences` (DPO's is `sigmoid`), plus `sft_weight` times the negative log-likelihood of the
preferred completions, a mean over all their tokens. The reference are the start weights; its log-probabilities are
computed once an iteration.
"""

from dataclasses import dataclass

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
    share_of_tokens,
)
from flowalign.algorithms.text.pairs import judged, pairs_of
from flowalign.config import Named, TextConfig
from flowalign.core.preferences import WITH_REWARDS, WITHOUT_REFERENCE
from flowalign.data.texts import TextPreferences
from flowalign.errors import ConfigError
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.rollouts.processes import Processes


class TextDPOSettings(base.AlgorithmSettings):
    loss: Named = Named(name="sigmoid")
    """Name in `flowalign list preferences`, with its settings."""
    sft_weight: float = Field(0.0, ge=0)
    """Weight of the preferred completions' negative log-likelihood; published: 1 for cpo and orpo."""


@dataclass(kw_only=True)
class LinePairs(LineExperience):
    reference: Tensor
    """[B] log-probabilities of the completions under the start weights; 0 where the loss needs none."""
    factor: float
    """Factor of a preferred completion's summed negative log-likelihood."""


class TextDPO(LineLearning):
    """DPO and its relatives for language models, the loss by name (arXiv 2305.18290)."""

    name = "text_dpo"
    Settings = TextDPOSettings
    settings: TextDPOSettings
    headline = "preference/accuracy"
    lines = TextPreferences

    def __init__(self, settings: TextDPOSettings) -> None:
        super().__init__(settings)
        self.loss_of = settings.loss.part("preferences", "algorithm.loss")

    def check(self, config: TextConfig) -> None:
        super().check(config)
        if self.settings.loss.name in WITH_REWARDS:
            raise ConfigError(
                f"algorithm.loss: '{self.settings.loss.name}' needs rewards of both texts, and the data have none; "
                "online_text_dpo works"
            )

    @property
    def uses_reference(self) -> bool:
        return self.settings.loss.name not in WITHOUT_REFERENCE

    def experience(self, sampled: SampledLines, record: None, processes: Processes) -> LinePairs:
        batch = sampled.batch
        rollout = completions(sampled.sampler, batch, ["chosen", "rejected"])
        reference = torch.zeros(len(rollout), device=processes.device)
        if self.uses_reference:
            reference = reference_log_probs(sampled.sampler, rollout)
        chosen = line_numbers(batch, processes.device)
        factor = share_of_tokens(rollout, chosen[:, 0], processes)
        items = torch.cat([chosen, chosen + len(batch)], 1)
        return LinePairs(batch=batch, metrics={}, items=items, rollout=rollout, reference=reference, factor=factor)

    def losses(
        self, policy: LanguagePolicy, experience: LineExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(experience, LinePairs)
        pairs = pairs_of(policy, experience.rollout, experience.reference, items)
        losses = self.loss_of(pairs) - self.settings.sft_weight * experience.factor * pairs.chosen
        return losses, judged(pairs)
