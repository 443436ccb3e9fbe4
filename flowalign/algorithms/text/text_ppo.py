"""PPO for language models: a critic values every token's state, in the place of a group's mean.

Rollout: completions; a group of them is not needed, and does no harm. Credit: `gae`, generalised advantages of the
critic's values (arXiv 1506.02438, as in arXiv 2203.02155). Loss: PPO's clip, plus `value_weight` times the critic's
clipped squared error. The critic is a copy of the start network with a head of one number, and trains what the policy
trains, its LoRA or all weights, at the policy's learning rate. Departure: in TRL and verl the critic has a rate of its
own.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from flowalign.algorithms.policy_gradient import ActionExperience
from flowalign.algorithms.text import base as language
from flowalign.config import Named
from flowalign.core.baselines import clipped_value_loss, generalised
from flowalign.core.record import Record, masked_mean, masked_sum
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.rollout import TextRollout
from flowalign.rollouts.language import SampledTexts, gather_padded
from flowalign.rollouts.processes import Processes


class TextPPOSettings(language.LanguageSettings):
    advantage: Named = Named(name="gae")
    value_weight: float = Field(0.5, gt=0)
    value_clip: float = Field(0.5, gt=0)
    """Largest change of a value for the better that the critic's loss still pays, as in verl."""


class Critic(nn.Module):
    """The value of the state before each token of a completion."""

    def __init__(self, policy: LanguagePolicy) -> None:
        super().__init__()
        self.backbone: Any = copy.deepcopy(policy.network.base_model)
        size = policy.network.config.get_text_config().hidden_size
        self.head = nn.Linear(size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, policy: LanguagePolicy, rollout: TextRollout, rows: Tensor) -> Tensor:
        """[N, T] values, 0 where nothing was drawn."""
        mask = rollout.mask[rows]
        # a token's state is its predecessor's output
        return self.along(policy, rollout, rows)[:, -mask.shape[1] - 1 : -1].where(mask, 0)

    def along(self, policy: LanguagePolicy, rollout: TextRollout, rows: Tensor) -> Tensor:
        """[N, P + T] values of the state after each token of prompts and completions."""
        ids = torch.cat([rollout.prompt_ids[rows], rollout.completion_ids[rows]], 1)
        attention = torch.cat([rollout.prompt_mask[rows], rollout.present[rows]], 1)
        return self.after(ids, attention, **policy.replay_inputs(rollout, rows, attention))

    def after(self, ids: Tensor, attention: Tensor, **inputs: Any) -> Tensor:
        """[N, L] values of the state after each of the token ids [N, L]; `inputs` are further ones of the network."""
        outputs = self.backbone(input_ids=ids, attention_mask=attention.long(), **{"use_cache": False} | inputs)
        value: Tensor = self.head(outputs.last_hidden_state.float())[..., 0]
        return value


@dataclass(kw_only=True)
class ValuedExperience(ActionExperience):
    value: Tensor
    """[B, T] values when the texts were sampled."""
    returns: Tensor
    """[B, T] what the critic learns."""


class TextPPO(language.LanguageAlgorithm):
    """PPO with a critic on a language model's tokens (arXiv 1707.06347, 2203.02155)."""

    name = "text_ppo"
    Settings = TextPPOSettings
    settings: TextPPOSettings
    fields = language.LanguageAlgorithm.fields | {"value"}
    combines = language.LanguageAlgorithm.combines - {"shards"}
    critic: Critic

    def modules(self, policy: LanguagePolicy) -> Mapping[str, nn.Module]:
        self.critic = Critic(policy).to(policy.device)
        return {"critic": self.critic}

    @torch.no_grad()
    def record(self, sampled: SampledTexts, processes: Processes) -> Record:
        record, policy, rollout = super().record(sampled, processes), sampled.sampler.policy, sampled.rollout
        rows = torch.arange(len(rollout), device=policy.device).split(sampled.sampler.config.rollout.batch_size)
        value = torch.cat([self.critic(policy, rollout, chunk) for chunk in rows])
        record.value = gather_padded(processes, value, record.mask.shape[1])
        return record

    def experience(self, sampled: SampledTexts, record: Record, processes: Processes) -> ValuedExperience:
        plain, length = super().experience(sampled, record, processes), sampled.rollout.mask.shape[1]
        assert record.value is not None
        settings = self.settings.advantage.settings
        advantage = generalised(record, settings.get("gamma", 1.0), settings.get("smoothing", 0.95))
        returns = advantage + record.value

        def own(values: Tensor) -> Tensor:
            return processes.own(values, len(sampled.batch))[:, :length]

        given = {field.name: getattr(plain, field.name) for field in fields(plain)} | {"all_teach": True}
        plain.metrics["critic/value"] = record.value[record.mask].mean().item()
        error, spread = advantage[record.mask].var(), returns[record.mask].var().clamp(min=1e-8)
        plain.metrics["critic/explained"] = (1 - error / spread).item()
        return ValuedExperience(**given, value=own(record.value), returns=own(returns))

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
