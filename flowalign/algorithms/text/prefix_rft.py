"""Prefix-RFT: one member of a group goes on from the beginning of a demonstration (arXiv 2507.01679).

Rollout: the last member of each group begins with a share of its prompt's demonstration, by cosine from `start` to
`end` over training, and is the policy's from there on; at least a token of the demonstration is left to it. Credit and
loss are GRPO's on the whole text, but of the demonstrated tokens only the most uncertain learn. The paper takes
Dr. GRPO's advantage, `advantage: {name: dr_grpo}`.

The authors' code (recipe/prefix_rft) was read; it publishes no settings. Departures: there a share is drawn from a Beta
distribution between two bounds, each with a schedule, a group may have several such members, and a prefix has a least
length; the most uncertain are chosen there among all prefixes of a mini-batch under the current weights, here in each
text under the weights that sampled; demonstrated tokens may go unclipped there, here they have all others' loss.
"""

from typing import Annotated

import torch
from pydantic import Field

from flowalign.algorithms.policy_gradient import ActionExperience
from flowalign.algorithms.text import base as language
from flowalign.algorithms.text.demonstrations import demonstrations, last_members
from flowalign.core.imitation import prefix_share, uncertain_prefix
from flowalign.core.record import Record
from flowalign.data.batches import Batch
from flowalign.policies.language.rollout import TextRollout
from flowalign.policies.language.teacher_forcing import continued
from flowalign.rollouts.language import LanguageSampler, SampledTexts
from flowalign.rollouts.processes import Processes

Share = Annotated[float, Field(ge=0, le=1)]


class PrefixRFTSettings(language.LanguageSettings):
    demonstration: str = "demonstration"
    """Key of the metadata with the demonstration."""
    start: Share = 0.95
    end: Share = 0.05
    """Share of the demonstration that is given, at the beginning and at the end of training."""
    uncertain: Share = 0.2
    """Share of a demonstration's tokens that learn, the most uncertain ones."""


class PrefixRFT(language.LanguageAlgorithm):
    """Prefix-RFT: each group's last member continues a demonstration; `reward/mean` counts it (arXiv 2507.01679)."""

    name = "prefix_rft"
    Settings = PrefixRFTSettings
    settings: PrefixRFTSettings
    takes_turns = False
    combines = language.LanguageAlgorithm.combines - {"replay", "served"}
    done = 0.0

    def progress(self, done: float) -> None:
        self.done = done

    def prefixes(self, sampler: LanguageSampler, batch: Batch) -> list[list[int]]:
        """Token ids of the demonstration that each sample begins with; none but for the last of a group."""
        share = prefix_share(self.done, self.settings.start, self.settings.end)
        shown = [row for row, last in enumerate(last_members(batch)) if last]
        prefixes: list[list[int]] = [[] for _ in batch.prompts]
        for row, text in zip(shown, demonstrations(batch, shown, self.settings.demonstration), strict=True):
            tokens = sampler.policy.tokenizer(text, add_special_tokens=False).input_ids
            prefixes[row] = list(tokens[: min(int(share * len(tokens)), len(tokens) - 1)])
        return prefixes

    def sampled(self, sampler: LanguageSampler, batch: Batch) -> TextRollout:
        arguments = sampler.config.rollout.arguments()
        prefixes = self.prefixes(sampler, batch)
        return continued(
            sampler.policy, batch.prompts, prefixes, batch.noise_seeds, metadata=batch.metadata, **arguments
        )

    def experience(self, sampled: SampledTexts, record: Record, processes: Processes) -> ActionExperience:
        experience = super().experience(sampled, record, processes)
        rollout = experience.rollout
        prefixes = self.prefixes(sampled.sampler, sampled.batch)
        count = torch.tensor([len(tokens) for tokens in prefixes], device=processes.device)
        prefix = (torch.arange(rollout.mask.shape[1], device=processes.device) < count[:, None]) & rollout.mask
        learned = uncertain_prefix(rollout.entropy, prefix, self.settings.uncertain)
        experience.loss_weight = experience.loss_weight.where(~prefix | learned, 0)
        # divergences are estimated on what the policy drew
        experience.divergence_weight = experience.divergence_weight.where(~prefix, 0)
        return experience
