"""Supervised fine-tuning of a language model on completions of the data.

Loss: the negative log-likelihood of a completion and its end token, a mean over all tokens of an iteration; a prompt's
tokens teach nothing (TRL's completion_only_loss). A line without a completion whose messages end with the assistant's
turn is a chat: all of the assistant's turns are learned, with their end tokens (TRL's assistant_only_loss).

With `weight` and `prefix` it is C-RLFT (OpenChat, arXiv 2309.11235): sources of data are classes, each with a text
before the prompt, and a line weighs exp(reward of its class / beta); at inference prompts begin with the best class.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
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
from flowalign.data.batches import Batch
from flowalign.data.messages import MESSAGES
from flowalign.data.texts import check_texts
from flowalign.errors import ConfigError
from flowalign.policies.language.conversations import conversed
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.rollouts.processes import Processes


class TextSFTSettings(base.AlgorithmSettings):
    completion: str = "completion"
    """Key of the data's completions."""
    weight: str | None = None
    """Key of a number that a line's loss is multiplied with, such as how good its source is; null: all alike."""
    prefix: str | None = None
    """Key of a text that the prompt is given after, such as a class of sources; null: none."""


@dataclass(kw_only=True)
class SFTExperience(LineExperience):
    factor: float
    """Factor of a completion's summed loss."""
    weight: Tensor
    """[B] a further factor, each line's own"""


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
            self.check_line(record, place)
            if not self.is_chat(record):
                check_texts(record, (self.settings.completion,), place)
            elif record[MESSAGES][0]["role"] == "assistant":
                raise ConfigError(f"{place}: a chat that the assistant begins; a user's or a system's turn comes first")
        if len(set(map(self.is_chat, prompts.metadata))) > 1:
            raise ConfigError("data.prompts: some lines are chats and some have a completion; lists of one kind work")
        return prompts

    def check_line(self, record: Mapping[str, Any], place: str) -> None:
        """Refuse a line without the weight or the prefix that the settings name."""
        key, prefix = self.settings.weight, self.settings.prefix
        if key is not None and not (isinstance(record.get(key), int | float) and 0 <= record[key] < math.inf):
            raise ConfigError(f"{place}: no number of 0 or more under the key {key!r}, which algorithm.weight names")
        if prefix is not None and (not isinstance(record.get(prefix), str) or MESSAGES in record):
            raise ConfigError(
                f"{place}: no text under {prefix!r}, which algorithm.prefix names, before a prompt of text"
            )

    def is_chat(self, record: Mapping[str, Any]) -> bool:
        """Whether a line is a chat to learn the assistant's turns of."""
        messages = record.get(MESSAGES, [])
        return self.settings.completion not in record and bool(messages) and messages[-1]["role"] == "assistant"

    def experience(self, sampled: SampledLines, record: None, processes: Processes) -> SFTExperience:
        batch = sampled.batch
        if all(map(self.is_chat, batch.metadata)):
            rollout = conversed(sampled.sampler.policy, [record[MESSAGES] for record in batch.metadata])
        else:
            rollout = completions(sampled.sampler, self.prefixed(batch), [self.settings.completion])
        items = line_numbers(batch, processes.device)
        factor = share_of_tokens(rollout, items[:, 0], processes)
        key = self.settings.weight
        weight = torch.tensor([1.0 if key is None else float(line[key]) for line in batch.metadata])
        return SFTExperience(
            batch=batch, metrics={}, items=items, rollout=rollout, factor=factor, weight=weight.to(processes.device)
        )

    def prefixed(self, batch: Batch) -> Batch:
        """The lines with prompts as they are given to the model."""
        key = self.settings.prefix
        if key is None:
            return batch
        prompts = [line[key] + prompt for prompt, line in zip(batch.prompts, batch.metadata, strict=True)]
        return replace(batch, prompts=prompts)

    def losses(
        self, policy: LanguagePolicy, experience: LineExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(experience, SFTExperience)
        rows, mask = items[:, 0], experience.rollout.mask[items[:, 0]]
        log_prob, entropy = policy.log_probs(experience.rollout, rows)
        values = {"sft/loss": masked_mean(-log_prob.detach(), mask), "policy/entropy": masked_mean(entropy, mask)}
        return experience.factor * experience.weight[rows] * masked_sum(-log_prob, mask), values
