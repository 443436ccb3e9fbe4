"""PPO for language models: a critic values every token's state, in the place of a group's mean.

Rollout: completions; a group of them is not needed, and does no harm. Credit: `gae`, generalised advantages of the
critic's values (arXiv 1506.02438, as in arXiv 2203.02155). Loss: PPO's clip, plus `value_weight` times the critic's
clipped squared error. The critic is a copy of the start network with a head of one number, and trains what the policy
trains, its LoRA or all weights, at the policy's learning rate. Departure: in TRL and verl the critic has a rate of its
own.
"""

from collections.abc import Mapping

from pydantic import Field
from torch import Tensor, nn

from flowalign.algorithms.policy_gradient import ActionExperience
from flowalign.algorithms.text.critic import Critic, CriticSettings, ValuedExperience, WithCritic
from flowalign.core.baselines import clipped_value_loss
from flowalign.core.record import masked_mean, masked_sum
from flowalign.policies.language.policy import LanguagePolicy


class TextPPOSettings(CriticSettings):
    value_weight: float = Field(0.5, gt=0)
    value_clip: float = Field(0.5, gt=0)
    """Largest change of a value for the better that the critic's loss still pays, as in verl."""


class TextPPO(WithCritic):
    """PPO with a critic on a language model's tokens (arXiv 1707.06347, 2203.02155)."""

    name = "text_ppo"
    Settings = TextPPOSettings
    settings: TextPPOSettings

    def modules(self, policy: LanguagePolicy) -> Mapping[str, nn.Module]:
        self.critic = Critic(policy).to(policy.device)
        return {"critic": self.critic}

    def losses(
        self, policy: LanguagePolicy, experience: ActionExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(experience, ValuedExperience)
        losses, values = super().losses(policy, experience, items)
        rows, rollout = items[:, 0], experience.rollout
        mask, value = rollout.mask[rows], self.critic(policy, rollout, rows)
        error = clipped_value_loss(value, experience.value[rows], experience.returns[rows], self.settings.value_clip)
        values["critic/loss"] = masked_mean(error.detach(), mask)
        return losses + self.settings.value_weight * masked_sum(
            error * experience.divergence_weight[rows], mask
        ), values
