"""What methods with a critic of texts share: its network, values of the record, and the returns that it learns."""

import copy
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from flowalign.algorithms.policy_gradient import ActionExperience
from flowalign.algorithms.text import base as language
from flowalign.config import Named
from flowalign.core.baselines import generalised
from flowalign.core.record import Record
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.rollout import TextRollout
from flowalign.rollouts.language import SampledTexts, gather_padded
from flowalign.rollouts.processes import Processes


class CriticSettings(language.LanguageSettings):
    advantage: Named = Named(name="gae")


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


class WithCritic(language.LanguageAlgorithm):
    """Base: a critic values the tokens of an iteration's texts, and learns their TD(lambda) returns."""

    Settings = CriticSettings
    settings: CriticSettings
    fields = language.LanguageAlgorithm.fields | {"value"}
    combines = language.LanguageAlgorithm.combines - {"shards"}
    critic: Critic

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
