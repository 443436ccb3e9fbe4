"""OORL: reinforcement, and a preference between groups of texts of the data (arXiv 2505.12723).

Loss: GRPO's on the policy's own texts, plus `weight` times GEPO's: of each prompt the texts under `equivalent`, which
all mean the same, gain more than those under `inequivalent`, a mean over each, and gain alike. The paper's are programs
in a compiler's language, beside translations that unit tests reward.

An account of the paper was read, whose formulas were missing; where beta stands follows from its words. Departures: the
paper draws its groups apart from the prompts, here each prompt brings its own, in the data's metadata.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms.policy_gradient import ActionExperience
from flowalign.algorithms.text import base as language
from flowalign.algorithms.text.demonstrations import first_rows
from flowalign.algorithms.text.lines import reference_log_probs
from flowalign.config import Data
from flowalign.core.preferences import group_equivalence
from flowalign.core.record import Record, masked_sum
from flowalign.data import Prompts
from flowalign.errors import ConfigError
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.rollout import TextRollout
from flowalign.policies.language.teacher_forcing import demonstrated
from flowalign.rollouts.language import SampledTexts
from flowalign.rollouts.processes import Processes


class OORLSettings(language.LanguageSettings):
    equivalent: str = "equivalent"
    """Key of the metadata with a text, or a list of texts, that are right and mean the same."""
    inequivalent: str = "inequivalent"
    """Key of the metadata with a text, or a list of texts, that mean something else."""
    weight: float = Field(0.01, ge=0)
    """Weight of the preference; the reinforcement has 1."""
    beta: float = Field(0.1, gt=0)
    """Factor of the log-ratios in the preference, as DPO's; larger for texts of few tokens."""
    equivalence: float = Field(1.0, ge=0)
    """Weight of the variance of the equivalent texts' log-ratios, within the preference."""


@dataclass(kw_only=True)
class Alternatives:
    """Texts of the data of one process's prompts."""

    rollout: TextRollout
    """[N] texts, group by group, the equivalent ones first."""
    reference: Tensor
    """[N] log-probabilities of them under the start weights"""
    equivalent: Tensor
    """[N] bool"""
    group: Tensor
    """[N] numbers of the prompts, from 0 in the batch's order"""
    owner: dict[int, int]
    """The prompt's number, by the item that carries its preference: the first text of its group."""


@dataclass(kw_only=True)
class OORLExperience(ActionExperience):
    alternatives: Alternatives


class OORL(language.LanguageAlgorithm):
    """OORL: GRPO, and GEPO's preference for equivalent texts of the data (arXiv 2505.12723)."""

    name = "oorl"
    Settings = OORLSettings
    settings: OORLSettings
    takes_turns = False

    @property
    def uses_reference(self) -> bool:
        return True

    def read(self, data: Data) -> Prompts:
        prompts = super().read(data)
        for text, record in zip(prompts.texts, prompts.metadata, strict=True):
            for key in (self.settings.equivalent, self.settings.inequivalent):
                if not texts_of(record, key):
                    raise ConfigError(f"data.prompts: no texts under '{key}' with the prompt {text[:60]!r}")
        return prompts

    def experience(self, sampled: SampledTexts, record: Record, processes: Processes) -> OORLExperience:
        experience = super().experience(sampled, record, processes)
        # a group without spread has a preference too
        experience.all_teach = True
        batch, sampler = experience.batch, sampled.sampler
        firsts = first_rows(batch)
        texts, good, group = [], [], []
        for number, row in enumerate(firsts):
            for key in (self.settings.equivalent, self.settings.inequivalent):
                found = texts_of(batch.metadata[row], key)
                texts += found
                good += [key == self.settings.equivalent] * len(found)
                group += [number] * len(found)
        rows = [firsts[number] for number in group]
        prompts, metadata = [batch.prompts[row] for row in rows], [batch.metadata[row] for row in rows]
        rollout = demonstrated(sampler.policy, prompts, texts, metadata)
        alternatives = Alternatives(
            rollout=rollout,
            reference=reference_log_probs(sampler, rollout),
            equivalent=torch.tensor(good, device=processes.device),
            group=torch.tensor(group, device=processes.device),
            owner={row: number for number, row in enumerate(firsts)},
        )
        return OORLExperience(**vars(experience), alternatives=alternatives)

    def losses(
        self, policy: LanguagePolicy, experience: ActionExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        losses, values = super().losses(policy, experience, items)
        assert isinstance(experience, OORLExperience)
        alternatives = experience.alternatives
        share = len(experience.items) / len(alternatives.owner)
        extra = torch.zeros_like(losses)
        carriers = [place for place, row in enumerate(items[:, 0].tolist()) if row in alternatives.owner]
        if carriers:
            numbers = [alternatives.owner[row] for row in items[carriers, 0].tolist()]
            # the mean over items is then the mean over prompts
            extra[carriers] = share * self.preference(policy, alternatives, numbers)
        return losses + self.settings.weight * extra, values | {"preference/loss": extra.detach()}

    def preference(self, policy: LanguagePolicy, alternatives: Alternatives, numbers: Sequence[int]) -> Tensor:
        """GEPO's losses of these prompts."""
        place = torch.full((len(alternatives.owner),), -1, device=alternatives.group.device)
        place[list(numbers)] = torch.arange(len(numbers), device=place.device)
        rows = (place[alternatives.group] >= 0).nonzero()[:, 0]
        log_prob = masked_sum(policy.log_probs(alternatives.rollout, rows)[0], alternatives.rollout.mask[rows])
        return group_equivalence(
            log_prob - alternatives.reference[rows],
            alternatives.equivalent[rows],
            place[alternatives.group[rows]],
            beta=self.settings.beta,
            equivalence=self.settings.equivalence,
        )


def texts_of(record: dict[str, Any], key: str) -> list[str]:
    """The texts under a key; none where there is something else."""
    found = record.get(key, [])
    found = [found] if isinstance(found, str) else found
    return found if isinstance(found, list) and all(isinstance(text, str) and text for text in found) else []
