"""Adaptive Deep Reasoning: the first token decides between long and short reasoning, and has a loss of its own.

Loss: GRPO's, plus `mode_weight` times the cross-entropy between the two modes at a text's first token. The mode that
suits a prompt is the short one where at least `easy` of its group earned something, else the long one. The reward
`adaptive_mode` pays the suited mode beside it.

After the abstract (arXiv 2505.20101), which names a loss on the logits of the initial token and gives no formula.
"""

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import softplus

from flowalign.algorithms.policy_gradient import ActionExperience
from flowalign.algorithms.text import base as language
from flowalign.config import TextConfig
from flowalign.core.groups import group_mean_std
from flowalign.core.record import Actions, Record
from flowalign.errors import ConfigError
from flowalign.policies.language.decoding import Decoding
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.rollouts.language import SampledTexts
from flowalign.rollouts.processes import Processes


class ModeSettings(language.LanguageSettings):
    long: str = Field("<think>", min_length=1)
    """Text with whose first token the long mode begins."""
    short: str = Field("<answer>", min_length=1)
    """Text with whose first token the short mode begins."""
    easy: float = Field(0.5, gt=0, le=1)
    """Share of a group with a reward above 0 from which on a prompt wants the short mode."""
    mode_weight: float = Field(0.1, ge=0)
    """Weight of the loss of the first token."""


class ModeSwitching(language.LanguageAlgorithm):
    """GRPO with a loss on each text's first token, which decides how long it reasons (after arXiv 2505.20101)."""

    name = "mode_switching"
    Settings = ModeSettings
    settings: ModeSettings
    takes_turns = False

    def check(self, config: TextConfig) -> None:
        super().check(config)
        if Decoding.of(config.rollout).cuts:
            raise ConfigError(
                "rollout: mode_switching compares two modes, one of which top_k, top_p or min_p may cut off; "
                "their defaults work"
            )

    def modules(self, policy: LanguagePolicy) -> Mapping[str, nn.Module]:
        self.long, self.short = (
            policy.tokenizer(text, add_special_tokens=False).input_ids[0]
            for text in (self.settings.long, self.settings.short)
        )
        if self.long == self.short:
            raise ConfigError("algorithm.short: it begins with the same token as algorithm.long; another text works")
        return {}

    def experience(self, sampled: SampledTexts, record: Record, processes: Processes) -> ActionExperience:
        experience = super().experience(sampled, record, processes)
        # groups whose advantages are 0 have a mode that suits them too
        experience.all_teach = True
        return experience

    def penalties(
        self, policy: LanguagePolicy, experience: ActionExperience, rows: Tensor, tokens: Actions
    ) -> dict[str, tuple[float, Tensor]]:
        found = super().penalties(policy, experience, rows, tokens)
        earned, _ = group_mean_std((experience.reward > 0).float(), experience.group)
        loss = torch.zeros_like(tokens.log_prob)
        loss[:, 0] = mode_loss(self._odds(policy, experience, rows), earned[rows] < self.settings.easy)
        return found | {"policy/mode": (self.settings.mode_weight, loss)}

    def _odds(self, policy: LanguagePolicy, experience: ActionExperience, rows: Tensor) -> Tensor:
        """[N] log-odds of the long mode against the short one at the first token."""
        odds = policy.log_probs(
            experience.rollout,
            rows,
            lambda log_probs: log_probs[:, self.long] - log_probs[:, self.short],
            with_gradient=True,
        )[1]
        return odds[:, 0]


def mode_loss(odds: Tensor, wants_long: Tensor) -> Tensor:
    """[N] cross-entropy of the mode that is wanted.

    Args:
        odds: [N] log-odds of the long mode.
        wants_long: [N] bool.
    """
    return softplus(torch.where(wants_long, -odds, odds))
