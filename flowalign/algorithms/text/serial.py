"""S-GRPO: one text, cut at several places and asked for its answer there; the earlier an answer is right, the more it
earns (arXiv 2505.07686).

Rollout: the last member of each group is sampled whole. The others begin with its thought up to a place that is drawn
evenly over it, then `lead`, and answer from there; they stand in the order of their places. Credit: of a group's right
answers the first earns its reward, and each further one the `decay`-th part of the one before; a wrong one earns its
reward, 0. `advantage: {name: dr_grpo}` takes a group's mean off, as published. Loss: GRPO's on the thought and the
answer; `lead`, which nobody sampled, is left out.

After the abstract and summaries of the paper; no code of its authors was found.
"""

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms.policy_gradient import ActionExperience
from flowalign.algorithms.text import base as language
from flowalign.algorithms.text.demonstrations import last_members
from flowalign.core.record import Record
from flowalign.data.batches import Batch
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.rollout import TextRollout
from flowalign.policies.language.teacher_forcing import continued
from flowalign.rollouts.language import LanguageSampler, SampledTexts
from flowalign.rollouts.processes import Processes


class SerialSettings(language.LanguageSettings):
    lead: str = "\n</think>\n\n"
    """Text that ends a thought, and is put after a cut one."""
    answer_tokens: int | None = Field(None, ge=1)
    """Largest length of an answer after a cut; default rollout.max_new_tokens."""
    decay: float = Field(2.0, ge=1)
    """Factor by which a right answer earns less for each right one before it."""
    right: float = 0.5
    """Reward from which on a text is right."""


class Serial(language.LanguageAlgorithm):
    """A group is one text, cut at several places and asked for its answer; early right ones earn most (S-GRPO)."""

    name = "serial"
    Settings = SerialSettings
    settings: SerialSettings
    takes_turns = False
    combines = language.LanguageAlgorithm.combines - {"replay", "served"}

    def sampled(self, sampler: LanguageSampler, batch: Batch) -> TextRollout:
        policy, arguments = sampler.policy, sampler.config.rollout.arguments()
        last = last_members(batch)
        whole, cut = ([row for row, is_last in enumerate(last) if is_last is wanted] for wanted in (True, False))
        rows = batch[whole]
        full = policy.sample(rows.prompts, rows.noise_seeds, metadata=rows.metadata, **arguments)
        lead = self._lead(policy)
        thoughts = dict(zip(rows.group, self._thoughts(policy, full), strict=True))
        places = cuts(batch, {number: len(thought) for number, thought in thoughts.items()})
        prefixes = [thoughts[batch.group[row]][: places[row]] + lead for row in cut]
        rows = batch[cut]
        if self.settings.answer_tokens is not None:
            arguments |= {"max_new_tokens": self.settings.answer_tokens}
        answered = continued(policy, rows.prompts, prefixes, rows.noise_seeds, metadata=rows.metadata, **arguments)
        order = torch.tensor([*whole, *cut]).argsort()
        return TextRollout.cat([full, answered])[order.tolist()]

    def record(self, sampled: SampledTexts, processes: Processes) -> Record:
        record = super().record(sampled, processes)
        record.reward = decayed(record.reward, record.group, self.settings.decay, self.settings.right)
        return record

    def experience(self, sampled: SampledTexts, record: Record, processes: Processes) -> ActionExperience:
        experience = super().experience(sampled, record, processes)
        rollout, batch, policy = experience.rollout, sampled.batch, sampled.sampler.policy
        whole = [row for row, last in enumerate(last_members(batch)) if last]
        thoughts = self._thoughts(policy, rollout[whole])
        places = cuts(batch, {batch.group[row]: len(thought) for row, thought in zip(whole, thoughts, strict=True)})
        begin = torch.tensor(places, device=rollout.mask.device)[:, None]
        position = torch.arange(rollout.mask.shape[1], device=rollout.mask.device)
        given = (position >= begin) & (position < begin + len(self._lead(policy)))
        given[whole] = False
        experience.loss_weight = experience.loss_weight.where(~given, 0)
        experience.divergence_weight = experience.divergence_weight.where(~given, 0)
        return experience

    def _lead(self, policy: LanguagePolicy) -> list[int]:
        return list(policy.tokenizer(self.settings.lead, add_special_tokens=False).input_ids)

    def _thoughts(self, policy: LanguagePolicy, rollout: TextRollout) -> list[list[int]]:
        """Token ids of each text up to the lead, or to its end token."""
        lead, found = self._lead(policy), []
        for tokens, mask in zip(rollout.completion_ids.tolist(), rollout.mask.tolist(), strict=True):
            text = [token for token, on in zip(tokens, mask, strict=True) if on and token not in policy.ends]
            ends = (i for i in range(len(text)) if lead and text[i : i + len(lead)] == lead)
            found.append(text[: next(ends, len(text))])
        return found


def cuts(batch: Batch, lengths: dict[int, int]) -> list[int]:
    """Where each sample's thought is cut, in tokens, in order within a group; the group's last one not at all.

    Args:
        lengths: tokens of each group's thought.
    """
    places = [lengths[number] for number in batch.group]
    for number, length in lengths.items():
        rows = [row for row, group in enumerate(batch.group) if group == number][:-1]
        random = torch.Generator().manual_seed(batch.noise_seeds[rows[0]])
        drawn = torch.randint(1, max(1, length) + 1, (len(rows),), generator=random).clamp(max=length).sort().values
        for row, place in zip(rows, drawn.tolist(), strict=True):
            places[row] = place
    return places


def decayed(reward: Tensor, group: Tensor, decay: float, right: float = 0.5) -> Tensor:
    """[B] rewards over decay to the number of right texts before them in their group.

    Args:
        reward: [B].
        group: [B] integers.
        right: reward from which on a text is right.
    """
    is_right = reward >= right
    before = torch.zeros_like(reward)
    for number in group.unique().tolist():
        rows = group == number
        before[rows] = (is_right[rows].cumsum(0) - is_right[rows].long()).to(reward)
    return torch.where(is_right, reward / decay**before, reward)
