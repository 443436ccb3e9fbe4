"""Members of a group that are sampled under a richer prompt and learned from under the plain one.

Rollout: the last `members` of each group are sampled with a hint in the prompt, the right answer (ExPO, arXiv
2507.02834), a
policy document (TriMPI's PolicyRollout) or guidance (Agent-RLVR, arXiv 2506.11425); their old log-probabilities are
those without it. Credit and loss are GRPO's. With `when: failed` they count where no member without a hint is right;
elsewhere they get the mean of the others, hence about no advantage.

After the abstracts. Departures: hinted members take places of the group instead of coming on top, and are sampled
beside the others instead of afterwards, where all of these failed.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms.text import base as language
from flowalign.algorithms.text.prompted import check_fields, filled, under
from flowalign.config import Data, TextConfig
from flowalign.core.record import Record
from flowalign.data import Prompts
from flowalign.data.batches import Batch
from flowalign.errors import ConfigError
from flowalign.policies.language.rollout import TextRollout
from flowalign.rollouts.language import LanguageSampler, SampledTexts
from flowalign.rollouts.processes import Processes


class HintedSettings(language.LanguageSettings):
    template: str = "{prompt}\n\n(The right answer is {answer}.)\n"
    """Prompt with a hint; names in braces are the prompt and keys of its metadata."""
    members: int = Field(1, ge=1)
    """Number of a group's members that get the hint."""
    when: Literal["failed", "always"] = "failed"
    """Groups in which hinted members count: those without another right text, or all."""
    right: float = 0.5
    """Reward from which on a text is right."""


class Hinted(language.LanguageAlgorithm):
    """Some members are sampled with a hint in the prompt and learned from without it (after ExPO, arXiv 2507.02834)."""

    name = "hinted"
    Settings = HintedSettings
    settings: HintedSettings
    takes_turns = False

    def read(self, data: Data) -> Prompts:
        prompts = super().read(data)
        check_fields(self.settings.template, prompts)
        return prompts

    def check(self, config: TextConfig) -> None:
        super().check(config)
        if self.settings.members >= config.training.group_size:
            raise ConfigError(
                f"algorithm.members: {self.settings.members} hinted ones leave none of a group of "
                f"{config.training.group_size} without a hint; fewer work"
            )

    def sampled(self, sampler: LanguageSampler, batch: Batch) -> TextRollout:
        hinted, policy, sampling = hinted_members(batch, self.settings.members), sampler.policy, sampler.config.rollout
        prompts = [
            filled(self.settings.template, prompt, record) if shown else prompt
            for prompt, record, shown in zip(batch.prompts, batch.metadata, hinted, strict=True)
        ]
        rollout = policy.sample(prompts, batch.noise_seeds, metadata=batch.metadata, **sampling.arguments())
        # the others' log-probabilities are of the same prompts; all come from one forward pass
        return under(policy, rollout, batch.prompts, batch.metadata, sampling.batch_size)

    def record(self, sampled: SampledTexts, processes: Processes) -> Record:
        record = super().record(sampled, processes)
        if self.settings.when == "failed":
            hinted = torch.tensor(hinted_members(sampled.batch, self.settings.members), device=processes.device)
            record.reward = failed_alone(record.reward, processes.gather(hinted), record.group, self.settings.right)
        return record


def hinted_members(batch: Batch, count: int) -> list[bool]:
    """Whether each sample is among the last `count` of its group."""
    rows: dict[int, list[int]] = {}
    for row, number in enumerate(batch.group):
        rows.setdefault(number, []).append(row)
    hinted = {row for members in rows.values() for row in members[-count:]}
    return [row in hinted for row in range(len(batch))]


def failed_alone(reward: Tensor, hinted: Tensor, group: Tensor, right: float) -> Tensor:
    """Rewards where hinted members of groups with another right text get the mean of their group's other members.

    Args:
        reward: [B].
        hinted: [B] bool.
        group: [B] integers.
    """
    changed = reward.clone()
    for number in group[hinted].unique().tolist():
        others = (group == number) & ~hinted
        if (reward[others] >= right).any():
            changed[(group == number) & hinted] = reward[others].mean()
    return changed
