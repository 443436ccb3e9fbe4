"""GRPO with one more text a group that is imitated: what CHORD, ReLIFT and AEPO have in common.

The losses of the group's own texts and of the imitated ones are averaged apart, the latter over all tokens of the texts
that count, and summed up with a coefficient each. An imitated text is an item like any other, so that micro-batches,
several updates and several processes are the trainer's business.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from flowalign.algorithms.policy_gradient import ActionExperience
from flowalign.algorithms.text import base as language
from flowalign.algorithms.text.demonstrations import first_rows
from flowalign.config import TextConfig
from flowalign.core.imitation import imitation_loss
from flowalign.core.record import Actions, Record
from flowalign.policies.language.rollout import TextRollout
from flowalign.rollouts.language import SampledTexts
from flowalign.rollouts.processes import Processes


@dataclass(kw_only=True)
class Examples:
    """Texts that one process imitates in an iteration."""

    rollout: TextRollout
    """One text a group, in the batch's order."""
    counts: Tensor
    """[groups] bool: the text is learned."""
    own: float
    """Coefficient of the loss of the group's own texts."""
    imitated: float
    """Coefficient of the loss of the examples."""


class Imitating(language.LanguageAlgorithm):
    """Base: a subclass says what is imitated, and how much."""

    weighting: Literal["none", "chord"] = "none"
    """Weighting of an imitated token's loss, as in `core.imitation.imitation_loss`."""
    # imitated texts are in no group
    piece = "row"

    def items(self, config: TextConfig) -> int:
        return super().items(config) + 1

    @abstractmethod
    def examples(self, sampled: SampledTexts, experience: ActionExperience) -> Examples:
        """Texts to imitate in this iteration."""

    def experience(self, sampled: SampledTexts, record: Record, processes: Processes) -> ActionExperience:
        experience = super().experience(sampled, record, processes)
        examples = self.examples(sampled, experience)
        rows = len(experience.rollout)
        rollout = TextRollout.cat([experience.rollout, examples.rollout])
        items = len(rollout)
        counted = examples.rollout.mask & examples.counts[:, None]
        # the mean over the tokens of all processes, whose losses the trainer averages
        tokens = processes.gather(counted.sum()[None]).sum().clamp(min=1)
        each = examples.imitated * items * processes.accelerator.num_processes / tokens

        def joined(own: Tensor, extra: Tensor) -> Tensor:
            width = rollout.mask.shape[1]
            return torch.cat([torch.nn.functional.pad(values, (0, width - values.shape[1])) for values in (own, extra)])

        firsts = first_rows(experience.batch)
        samples = torch.arange(rows).view(len(firsts), -1)
        extra = torch.arange(rows, items)[:, None]
        return replace(
            experience,
            items=torch.cat([samples, extra], 1).flatten()[:, None].to(processes.device),
            rollout=rollout,
            group=torch.cat([experience.group, experience.group[firsts]]),
            reward=torch.cat([experience.reward, experience.reward.new_zeros(len(firsts))]),
            advantage=joined(experience.advantage, torch.ones_like(counted, dtype=experience.advantage.dtype)),
            loss_weight=joined(experience.loss_weight * examples.own * items / rows, counted * each),
            # divergences are estimated on what the policy drew
            divergence_weight=joined(
                experience.divergence_weight * examples.own * items / rows, torch.zeros_like(counted)
            ),
            metrics=experience.metrics
            | {
                "imitation/share": processes.gather(examples.counts.float()).mean().item(),
                "imitation/coefficient": examples.imitated,
            },
        )

    def token_losses(
        self, experience: ActionExperience, rows: Tensor, tokens: Actions
    ) -> tuple[Tensor, dict[str, Tensor]]:
        imitated = (rows >= len(experience.batch))[:, None]
        losses, values = super().token_losses(experience, rows, tokens)
        return torch.where(imitated, imitation_loss(tokens.log_prob, self.weighting), losses), values
