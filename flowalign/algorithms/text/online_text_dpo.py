"""Online DPO for language models: the best and the worst own text of each group are a pair (arXiv 2402.04792).

Texts are the policy's, judged by the rewards; groups without a best and a worst teach nothing. The loss is one of
`core.preferences`, the reference the start weights, or a snapshot that follows the policy (DNO, arXiv 2404.03715).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowalign.algorithms import base
from flowalign.algorithms.text.lines import reference_log_probs
from flowalign.algorithms.text.pairs import judged, pairs_of
from flowalign.config import Named, TextConfig
from flowalign.core.preferences import WITHOUT_REFERENCE
from flowalign.core.record import Record
from flowalign.errors import ConfigError, nearest
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.rollout import TextRollout
from flowalign.rollouts.language import LanguageSampler, SampledTexts, record_of_texts
from flowalign.rollouts.processes import Processes
from flowalign.rollouts.scoring import score_metrics


class OnlineTextDPOSettings(base.AlgorithmSettings):
    loss: Named = Named(name="sigmoid")
    """Name in `flowalign list preferences`, with its settings."""
    reference: str = "reference"
    """Weights that gains refer to: the start weights, or a snapshot (`training.snapshots`)."""


@dataclass(kw_only=True)
class BestAndWorst(base.Experience):
    """One process's pairs of an iteration."""

    rollout: TextRollout
    """All texts, as they were sampled."""
    reference: Tensor
    """[B] log-probabilities of the pairs' texts under the start weights; 0 of the others."""
    reward: Tensor
    """[B]"""

    def useful(self, items: Tensor) -> Tensor:
        best, worst = self.reward[items].unbind(1)
        return best > worst


class OnlineTextDPO(
    base.Algorithm[TextConfig, LanguageSampler, LanguagePolicy, TextRollout, Record, BestAndWorst],
):
    """DPO on the best and the worst own text of each group (arXiv 2402.04792)."""

    name = "online_text_dpo"
    Settings = OnlineTextDPOSettings
    settings: OnlineTextDPOSettings
    kind = "text"
    combines = frozenset({"shards", "overlap", "passes"})
    headline = "reward/mean"
    unit = "pairs"

    def __init__(self, settings: OnlineTextDPOSettings) -> None:
        super().__init__(settings)
        self.loss_of = settings.loss.part("preferences", "algorithm.loss")

    def check(self, config: TextConfig) -> None:
        super().check(config)
        known = ["reference", *config.training.snapshots]
        if self.settings.reference not in known:
            raise ConfigError(
                f"algorithm.reference: no snapshot '{self.settings.reference}'; "
                f"{nearest(self.settings.reference, known)}"
            )

    @property
    def uses_reference(self) -> bool:
        return self.settings.loss.name not in WITHOUT_REFERENCE and self.settings.reference == "reference"

    def items(self, config: TextConfig) -> int:
        return 1

    def record(self, sampled: SampledTexts, processes: Processes) -> Record:
        return record_of_texts(sampled, sampled.scores.value, processes)

    def experience(self, sampled: SampledTexts, record: Record, processes: Processes) -> BestAndWorst:
        batch, rollout = sampled.batch, sampled.rollout
        reward = sampled.scores.value.to(processes.device)
        of_groups = reward.view(len(set(batch.group)), -1)
        first = torch.arange(len(of_groups), device=reward.device) * of_groups.shape[1]
        items = torch.stack([first + of_groups.argmax(1), first + of_groups.argmin(1)], 1)
        rows = items.flatten()
        reference = torch.zeros(len(rollout), device=processes.device)
        if self.settings.loss.name not in WITHOUT_REFERENCE:
            reference[rows] = reference_log_probs(sampled.sampler, rollout[rows], self.settings.reference)
        return BestAndWorst(
            batch=batch,
            metrics=score_metrics(sampled.scores, record.group, processes),
            items=items,
            rollout=rollout,
            reference=reference,
            reward=reward,
        )

    def verify(self, policy: LanguagePolicy, experience: BestAndWorst) -> None:
        """Nothing compares with the probabilities of sampling."""

    def losses(
        self, policy: LanguagePolicy, experience: BestAndWorst, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        best, worst = experience.reward[items].unbind(1)
        pairs = replace(pairs_of(policy, experience.rollout, experience.reference, items), gap=best - worst)
        return self.loss_of(pairs), judged(pairs)
