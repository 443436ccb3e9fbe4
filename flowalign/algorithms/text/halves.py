"""What methods share whose groups have two halves, the second of which is shown the texts of the first."""

from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from flowalign.algorithms.text import base as language
from flowalign.algorithms.text.prompted import check_fields, filled
from flowalign.config import Data, TextConfig
from flowalign.core.record import Record
from flowalign.data import Prompts
from flowalign.data.batches import Batch
from flowalign.errors import ConfigError
from flowalign.policies.language.rollout import TextRollout
from flowalign.rollouts.language import LanguageSampler, SampledTexts
from flowalign.rollouts.processes import Processes


class HalvesSettings(language.LanguageSettings):
    template: str
    """Prompt of an observer; names in braces are the prompt, the pioneer's text, and keys of the metadata."""


class Halves(language.LanguageAlgorithm):
    """Base: pioneers write, and as many observers write knowing what their pioneer wrote."""

    Settings = HalvesSettings
    settings: HalvesSettings
    takes_turns = False
    combines = language.LanguageAlgorithm.combines - {"replay", "served"}

    def read(self, data: Data) -> Prompts:
        prompts = super().read(data)
        check_fields(self.settings.template, prompts, ["pioneer"])
        return prompts

    def check(self, config: TextConfig) -> None:
        super().check(config)
        if config.training.group_size % 4:
            method = config.algorithm.name
            raise ConfigError(
                f"training.group_size: {method} takes pairs, two at least for a mean; multiples of 4 work"
            )

    def sampled(self, sampler: LanguageSampler, batch: Batch) -> TextRollout:
        second, policy, sampling = observers(batch), sampler.policy, sampler.config.rollout
        pioneers = [row for row in range(len(batch)) if not second[row]]
        watching = [row for row in range(len(batch)) if second[row]]
        first = self.first(sampler, batch[pioneers])
        there = batch[watching]
        prompts = [
            filled(self.settings.template, prompt, {**record, "pioneer": text})
            for prompt, record, text in zip(there.prompts, there.metadata, policy.decode(first), strict=True)
        ]
        answers = policy.sample(prompts, there.noise_seeds, metadata=there.metadata, **sampling.arguments())
        joined = TextRollout.cat([first, replace(answers, prompts=list(there.prompts))])
        position = {row: i for i, row in enumerate([*pioneers, *watching])}
        return joined[torch.tensor([position[row] for row in range(len(batch))])]

    def first(self, sampler: LanguageSampler, batch: Batch) -> TextRollout:
        """Texts of the pioneers."""
        return sampler.rollout(batch)

    def record(self, sampled: SampledTexts, processes: Processes) -> Record:
        record = super().record(sampled, processes)
        second = processes.gather(torch.tensor(observers(sampled.batch), device=processes.device))
        record.reward = self.credited(record.reward, second, record.group)
        # halves of a group are groups
        record.group = 2 * record.group + second
        return record

    @abstractmethod
    def credited(self, reward: Tensor, second: Tensor, group: Tensor) -> Tensor:
        """[B] rewards that are learned from; `second` are the observers, [B] bool."""


def observers(batch: Batch) -> list[bool]:
    """Whether each sample is in the second half of its group."""
    rows: dict[int, list[int]] = {}
    for row, number in enumerate(batch.group):
        rows.setdefault(number, []).append(row)
    late = {row for members in rows.values() for row in members[len(members) // 2 :]}
    return [row in late for row in range(len(batch))]
