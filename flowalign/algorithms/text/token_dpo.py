"""DPO with rewards of tokens, from a file of preferences.

`guide: model` is TGDPO (arXiv 2506.14574): beta times the log-ratio of `teacher`, a model that DPO has trained, to the
start weights scales how far each token may move. `guide: prompts` is T-REG (arXiv 2412.02685, after the abstract): the
start weights read the text under a `better` and a `worse` prompt, sigmoid(log-ratio) - 1/2 is a token's reward, and the
implicit rewards of tokens are held near it. What guides is computed once an iteration.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms import base
from flowalign.algorithms.text.lines import LineExperience, LineLearning, SampledLines, completions, line_numbers
from flowalign.algorithms.text.pairs import judged
from flowalign.algorithms.text.prompted import check_fields, filled, under
from flowalign.config import Data, TextConfig
from flowalign.core.preferences import Pairs
from flowalign.core.record import masked_sum
from flowalign.core.token_preferences import token_guided, token_regularised
from flowalign.data import Prompts
from flowalign.data.texts import TextPreferences
from flowalign.errors import ConfigError
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.teacher import Teacher
from flowalign.policies.language.teacher_forcing import rescored
from flowalign.rollouts.processes import Processes


class TokenDPOSettings(base.AlgorithmSettings):
    guide: Literal["model", "prompts"] = "prompts"
    """Source of the tokens' rewards: a model that DPO has trained, or two prompts."""
    teacher: str | None = None
    """Folder or hub name of that model."""
    better: str = "{prompt}\n\n(Answer as well as you can.)\n"
    """Prompt for a good answer; names in braces are the prompt and keys of its metadata."""
    worse: str = "{prompt}\n\n(Answer badly.)\n"
    """Prompt for a bad answer."""
    beta: float = Field(0.1, gt=0)
    alpha: float = Field(0.5, ge=0)
    """Weight of the tokens' rewards."""


@dataclass(kw_only=True)
class GuidedPairs(LineExperience):
    reference: Tensor
    """[B, T] log-probabilities of the tokens under the start weights."""
    guide: Tensor
    """[B, T] rewards of the tokens."""


class TokenDPO(LineLearning):
    """DPO whose tokens have rewards of their own: TGDPO (arXiv 2506.14574), T-REG (2412.02685)."""

    name = "token_dpo"
    Settings = TokenDPOSettings
    settings: TokenDPOSettings
    headline = "preference/accuracy"
    lines = TextPreferences
    uses_reference = True
    teacher: Teacher | None = None

    def check(self, config: TextConfig) -> None:
        super().check(config)
        if (self.settings.guide == "model") != (self.settings.teacher is not None):
            raise ConfigError(
                "algorithm.teacher: guide: model needs one, a model that DPO has trained, and guide: prompts has none"
            )

    def read(self, data: Data) -> Prompts:
        prompts = super().read(data)
        if self.settings.guide == "prompts":
            for template in (self.settings.better, self.settings.worse):
                check_fields(template, prompts)
        return prompts

    def experience(self, sampled: SampledLines, record: None, processes: Processes) -> GuidedPairs:
        batch, sampler = sampled.batch, sampled.sampler
        policy, size = sampler.policy, sampler.config.rollout.batch_size
        rollout = completions(sampler, batch, ["chosen", "rejected"])
        with policy.reference():
            reference = rescored(policy, rollout, size).log_prob
            if self.settings.guide == "prompts":
                better, worse = (
                    under(
                        policy, rollout, self._asked(template, batch.prompts, batch.metadata), batch.metadata * 2, size
                    )
                    for template in (self.settings.better, self.settings.worse)
                )
                guide = (better.log_prob - worse.log_prob).sigmoid() - 0.5
        if self.settings.teacher is not None:
            self.teacher = self.teacher or Teacher(self.settings.teacher, policy)
            guide = self.settings.beta * (self.teacher.log_probs(rollout, size) - reference)
        lines = line_numbers(batch, processes.device)
        items = torch.cat([lines, lines + len(batch)], 1)
        return GuidedPairs(batch=batch, metrics={}, items=items, rollout=rollout, reference=reference, guide=guide)

    def _asked(self, template: str, prompts: list[str], metadata: list[dict[str, object]]) -> list[str]:
        return [filled(template, prompt, record) for prompt, record in zip(prompts, metadata, strict=True)] * 2

    def losses(
        self, policy: LanguagePolicy, experience: LineExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(experience, GuidedPairs)
        rows = items.T.flatten()
        mask, reference = experience.rollout.mask[rows], experience.reference[rows]
        log_prob = policy.log_probs(experience.rollout, rows)[0]
        loss = token_guided if self.settings.guide == "model" else token_regularised
        losses = loss(log_prob - reference, experience.guide[rows], mask, self.settings.beta, self.settings.alpha)
        chosen, rejected = masked_sum(log_prob.detach(), mask).chunk(2)
        reference_chosen, reference_rejected = masked_sum(reference, mask).chunk(2)
        chosen_tokens, rejected_tokens = mask.sum(1).chunk(2)
        pairs = Pairs(
            chosen=chosen,
            rejected=rejected,
            reference_chosen=reference_chosen,
            reference_rejected=reference_rejected,
            chosen_tokens=chosen_tokens,
            rejected_tokens=rejected_tokens,
        )
        return losses, judged(pairs)
