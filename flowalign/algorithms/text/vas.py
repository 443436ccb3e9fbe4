"""Value Augmented Sampling: a value is learned, the policy stays, and texts are drawn by both (arXiv 2405.06639).

Rollout: texts of the policy as it is. Loss: the value of the state after each token, half its squared error from the
TD(lambda) return; nothing else is trained. Evaluations, `flowalign sample` and the gallery draw from softmax(logits +
beta * V), where V is the value after each of the most probable next tokens less their mean, and 0 of all others.

Authors' code (idanshen/Value-Augmented-Sampling): the same rule for the 20 most probable tokens, lambda 0.95, a value
model smaller than the policy. Departures: the value is a copy of the policy with a head of one number; it is learned
after each token, so that the end token has a value too, which theirs has not; what was read is read again for every
token, as no cache is kept between them.
"""

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import DynamicCache

from flowalign.algorithms.policy_gradient import ActionExperience
from flowalign.algorithms.text.critic import Critic, CriticSettings, ValuedExperience, WithCritic
from flowalign.config import TextConfig
from flowalign.core.record import masked_mean, masked_sum
from flowalign.data.batches import Batch
from flowalign.errors import ConfigError
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.rollout import TextRollout
from flowalign.rollouts.language import LanguageSampler

OF_THE_POLICY = ("loss", "off_policy", "entropy_share", "sequence_mask", "empg")
"""Settings of the policy's loss, which is not computed."""


class VASSettings(CriticSettings):
    beta: float = Field(3.0, ge=0)
    """Weight of values in the logits; 0: the policy as it is."""
    candidates: int = Field(20, ge=1)
    """Number of most probable next tokens whose value counts."""


class ValueAfter(Critic):
    """The value of the state after each token of a completion."""

    def forward(self, policy: LanguagePolicy, rollout: TextRollout, rows: Tensor) -> Tensor:
        """[N, T] values, 0 where nothing was drawn."""
        mask = rollout.mask[rows]
        return self.along(policy, rollout, rows)[:, -mask.shape[1] :].where(mask, 0)


class ValueGuide:
    """Adds beta times the centred values of the most probable next tokens to the logits."""

    def __init__(self, value: ValueAfter, beta: float, candidates: int) -> None:
        self.value, self.beta, self.candidates = value, beta, candidates

    @torch.no_grad()
    def __call__(self, ids: Tensor, mask: Tensor, logits: Tensor) -> Tensor:
        """[B, V] logits after the token ids [B, L]."""
        next_ids = logits.topk(min(self.candidates, logits.shape[-1]), -1).indices
        count, cache = next_ids.shape[1], DynamicCache()
        position = (mask.cumsum(1) - 1).clamp(min=0)
        self.value.after(ids, mask, position_ids=position, past_key_values=cache, use_cache=True)
        # every candidate goes on from what its row has read
        cache.batch_repeat_interleave(count)
        seen = torch.cat([mask, mask.new_ones(len(mask), 1)], 1).repeat_interleave(count, 0)
        after = (position[:, -1:] + 1).repeat_interleave(count, 0)
        value = self.value.after(
            next_ids.reshape(-1, 1), seen, position_ids=after, past_key_values=cache, use_cache=True
        )
        centred = value.view(-1, count) - value.view(-1, count).mean(1, keepdim=True)
        return logits.float().scatter_add(1, next_ids, self.beta * centred)


class VAS(WithCritic):
    """Value Augmented Sampling: a learned value moves what texts are drawn from, and the policy stays as it is."""

    name = "vas"
    Settings = VASSettings
    settings: VASSettings
    samples_otherwise = True
    takes_turns = False
    combines = WithCritic.combines - {"workers", "served"}

    def check(self, config: TextConfig) -> None:
        super().check(config)
        if config.rollout.continuous_batching or config.evaluation.continuous_batching:
            raise ConfigError("rollout.continuous_batching: a value guides what is drawn batch by batch; false works")
        if config.model.images:
            raise ConfigError("model.images: vas reads texts alone; false works")
        if config.model.draws is not None:
            raise ConfigError("model.draws: no value guides a picture's tokens; null works")
        for name in ("kl_weight", "entropy_weight"):
            if getattr(self.settings, name) != 0:
                raise ConfigError(f"algorithm.{name}: vas trains a value and leaves the policy as it is; 0 works")

    def without_effect(self, config: TextConfig) -> tuple[list[str], str]:
        fields = VASSettings.model_fields
        unused = [name for name in OF_THE_POLICY if getattr(self.settings, name) != fields[name].get_default()]
        return [f"algorithm.{name}" for name in unused], "trains a value, and computes no loss of the policy"

    def modules(self, policy: LanguagePolicy) -> Mapping[str, nn.Module]:
        self.critic = ValueAfter(policy).to(policy.device)
        policy.guide = ValueGuide(self.critic, self.settings.beta, self.settings.candidates)
        return {"critic": self.critic}

    def sampled(self, sampler: LanguageSampler, batch: Batch) -> TextRollout:
        guide, sampler.policy.guide = sampler.policy.guide, None
        try:
            return super().sampled(sampler, batch)
        finally:
            sampler.policy.guide = guide

    def losses(
        self, policy: LanguagePolicy, experience: ActionExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(experience, ValuedExperience)
        rows, rollout = items[:, 0], experience.rollout
        mask = rollout.mask[rows]
        error = 0.5 * (self.critic(policy, rollout, rows) - experience.returns[rows]) ** 2
        values = {"critic/loss": masked_mean(error.detach(), mask)}
        return masked_sum(error * experience.divergence_weight[rows], mask), values
