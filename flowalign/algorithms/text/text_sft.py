"""Supervised fine-tuning of a language model on completions of the data.

Loss: the negative log-likelihood of a completion and its end token, a mean over all tokens of an iteration; a prompt's
tokens teach nothing (TRL's completion_only_loss). A line without a completion whose messages end with the assistant's
turn is a chat: all of the assistant's turns are learned, with their end tokens (TRL's assistant_only_loss).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flowalign.algorithms import base
from flowalign.algorithms.text.lines import (
    LineExperience,
    LineLearning,
    SampledLines,
    completions,
    line_numbers,
    share_of_tokens,
)
from flowalign.config import Data
from flowalign.core.record import masked_mean, masked_sum
from flowalign.data import Prompts
from flowalign.data.messages import MESSAGES
from flowalign.data.texts import check_texts
from flowalign.errors import ConfigError
from flowalign.policies.language.conversations import conversed
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.rollouts.processes import Processes


class TextSFTSettings(base.AlgorithmSettings):
    completion: str = "completion"
    """Key of the data's completions."""


@dataclass(kw_only=True)
class SFTExperience(LineExperience):
    factor: float
    """Factor of a completion's summed loss."""


class TextSFT(LineLearning):
    """Supervised fine-tuning of a language model on prompts and completions."""

    name = "text_sft"
    Settings = TextSFTSettings
    settings: TextSFTSettings
    headline = "sft/loss"

    def read(self, data: Data) -> Prompts:
        prompts = super().read(data)
        for text, record in zip(prompts.texts, prompts.metadata, strict=True):
            place = f"data.prompts, the prompt {text[:60]!r}"
            if not self.is_chat(record):
                check_texts(record, (self.settings.completion,), place)
            elif record[MESSAGES][0]["role"] == "assistant":
                raise ConfigError(f"{place}: a chat that the assistant begins; a user's or a system's turn comes first")
        if len(set(map(self.is_chat, prompts.metadata))) > 1:
            raise ConfigError("data.prompts: some lines are chats and some have a completion; lists of one kind work")
        return prompts

    def is_chat(self, record: Mapping[str, Any]) -> bool:
        """Whether a line is a chat to learn the assistant's turns of."""
        messages = record.get(MESSAGES, [])
        return self.settings.completion not in record and bool(messages) and messages[-1]["role"] == "assistant"

    def experience(self, sampled: SampledLines, record: None, processes: Processes) -> SFTExperience:
        batch = sampled.batch
        if all(map(self.is_chat, batch.metadata)):
            rollout = conversed(sampled.sampler.policy, [record[MESSAGES] for record in batch.metadata])
        else:
            rollout = completions(sampled.sampler, batch, [self.settings.completion])
        items = line_numbers(batch, processes.device)
        factor = share_of_tokens(rollout, items[:, 0], processes)
        return SFTExperience(batch=batch, metrics={}, items=items, rollout=rollout, factor=factor)

    def losses(
        self, policy: LanguagePolicy, experience: LineExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(experience, SFTExperience)
        rows, mask = items[:, 0], experience.rollout.mask[items[:, 0]]
        log_prob, entropy = policy.log_probs(experience.rollout, rows)
        values = {"sft/loss": masked_mean(-log_prob.detach(), mask), "policy/entropy": masked_mean(entropy, mask)}
        return experience.factor * masked_sum(-log_prob, mask), values
