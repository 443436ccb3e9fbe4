"""ViSurf: a demonstration is a member of its group (arXiv 2510.10606).

Rollout: the last member of each group is the prompt's demonstration, rewarded like the others. Credit and loss are
GRPO's: imitation while the policy is worse, exploration beside it. Where another member is as good the demonstration
gets the mean of the others, hence about no advantage. The paper's two other controls are settings: `align` writes
demonstrations in the form of the model's own texts, and `unpaid` keeps rewards of thoughts from them, which they have
not. Departure: the demonstration takes a member's place instead of coming on top.
"""

import json

import torch
from torch import Tensor

from flowalign.algorithms.text import base as language
from flowalign.algorithms.text.demonstrations import demonstrations, last_members
from flowalign.core.imitation import demonstrated_reward
from flowalign.core.record import Record
from flowalign.data.batches import Batch
from flowalign.policies.language.decoding import Decoding
from flowalign.policies.language.rollout import TextRollout
from flowalign.policies.language.teacher_forcing import scored
from flowalign.rollouts.language import LanguageSampler, SampledTexts
from flowalign.rollouts.processes import Processes


class ViSurfSettings(language.LanguageSettings):
    demonstration: str = "demonstration"
    """Key of the metadata with the demonstration."""
    align: bool = False
    """Whether a demonstration that is JSON gets a blank after every comma and colon, as models write it."""
    unpaid: list[str] = []
    """Names of rewards that a demonstration does not get, such as one of the form of thoughts."""


class ViSurf(language.LanguageAlgorithm):
    """ViSurf: each group's last member is a demonstration; `reward/mean` counts it (arXiv 2510.10606)."""

    name = "visurf"
    combines = language.LanguageAlgorithm.combines - {"served"}
    Settings = ViSurfSettings
    settings: ViSurfSettings
    takes_turns = False

    def sampled(self, sampler: LanguageSampler, batch: Batch) -> TextRollout:
        last = last_members(batch)
        others = [row for row in range(len(batch)) if not last[row]]
        shown = [row for row in range(len(batch)) if last[row]]
        sampling = sampler.config.rollout
        texts = demonstrations(batch, shown, self.settings.demonstration)
        if self.settings.align:
            texts = [aligned(text) for text in texts]
        there, rule = batch[shown], Decoding.of(sampling)
        rollouts = [
            sampler.rollout(batch[others]),
            scored(sampler.policy, there.prompts, texts, rule, sampling.batch_size, there.metadata),
        ]
        joined = TextRollout.cat(rollouts)
        position = {row: i for i, row in enumerate([*others, *shown])}
        return joined[torch.tensor([position[row] for row in range(len(batch))])]

    def record(self, sampled: SampledTexts, processes: Processes) -> Record:
        record = super().record(sampled, processes)
        shown = processes.gather(torch.tensor(last_members(sampled.batch), device=processes.device))
        record.reward = record.reward - shown * self.withheld(record)
        record.reward = demonstrated_reward(record.reward, shown, record.group)
        return record

    def withheld(self, record: Record) -> Tensor:
        """[B] the part of each reward that demonstrations do not get."""
        total = torch.zeros_like(record.reward)
        for name in self.settings.unpaid:
            weight = record.reward_weights[record.names.index(name)] if name in record.names else 0.0
            total = total + weight * record.reward_of(name).nan_to_num()
        return total


def aligned(text: str) -> str:
    """The same JSON with a blank after every comma and colon; another text as it is."""
    try:
        return json.dumps(json.loads(text), ensure_ascii=False)
    except ValueError:
        return text
