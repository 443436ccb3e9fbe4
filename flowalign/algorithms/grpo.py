"""GRPO and its relatives for language models: every part by name (arXiv 2402.03300).

Rollout: a group of completions of each prompt, every token an action. Credit: `advantage`, one of the core's, of one
reward a completion; then `unlikeliness`, `empg` and the share of most entropy. Loss: `loss`, one of the core's, summed
up by `aggregation`, plus an estimate of the KL to the start weights. The defaults are GRPO with DAPO's mean over all
tokens, of a whole iteration as in TRL, and without KL; the recipes under configs/tiny_lm show what others set.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms import base
from flowalign.config import Named
from flowalign.core.aggregation import Aggregation, action_weights
from flowalign.core.divergences import Estimator, sampled_kl
from flowalign.core.entropy import entropy_modulated, uncertain, unlikeliness
from flowalign.core.policy_losses import WHOLE_GROUPS
from flowalign.core.record import Record, ScoredTokens, masked_mean
from flowalign.data import Batch
from flowalign.errors import ConfigError
from flowalign.policies.language import LanguagePolicy, TextRollout
from rewards import Scores

if TYPE_CHECKING:
    from flowalign.training.text_actor import TextActor


class Modulation(base.AlgorithmSettings):
    """EMPG's settings, on single tokens; see `core.entropy.entropy_modulated`."""

    sharpness: float = Field(1.0, ge=0)
    clarity: float = Field(0.05, ge=0)
    clarity_sharpness: float = Field(1.0, ge=0)


class GRPOSettings(base.AlgorithmSettings):
    advantage: Named = Named(name="grpo", unbiased=True)
    """`flowalign list advantages`, with its settings"""
    loss: Named = Named(name="ppo")
    """`flowalign list losses`, with its settings"""
    aggregation: Aggregation = "token"
    """mean over all tokens, over each text's ('sequence'), over texts of sums ('sum'), that over max_new_tokens"""
    kl_weight: float = Field(0.0, ge=0)
    """of the divergence from the start weights"""
    kl_estimator: Estimator = "k3"
    mask_truncated: bool = False
    """texts that were cut at max_new_tokens teach nothing (DAPO's overlong filtering)"""
    unlikeliness: float = Field(0.0, ge=0, le=1)
    """how much the likeliest of a group's right texts loses of its reward (arXiv 2506.02355)"""
    entropy_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """learn from this share of the tokens, those of most entropy"""
    empg: Modulation | None = None
    """modulate advantages by entropy (arXiv 2509.09265)"""


@dataclass
class Experience(base.Experience):
    """One process's part of an iteration."""

    rollout: TextRollout
    scores: Scores
    reward: Tensor
    """[B] that the advantages came from"""
    group: Tensor
    """[B]"""
    advantage: Tensor
    """[B, T]"""
    weight: Tensor
    """[B, T] of each token's loss: the mean over B of a row's weighted sum is the aggregated loss"""

    def items(self) -> Tensor:
        return torch.arange(len(self.rollout), device=self.advantage.device)[:, None]

    every: bool = False
    """the loss is not one of advantages alone, so that all rows teach"""

    def outcome(self) -> tuple[Tensor, Tensor]:
        return self.scores.value, masked_mean(self.advantage.abs(), self.rollout.mask)

    def useful(self, items: Tensor) -> Tensor | None:
        if self.every:
            return None
        return ((self.advantage * self.weight) != 0).any(1)[items[:, 0]]


class GRPO(base.Algorithm[Experience]):
    """GRPO on a language model's tokens, its advantage, loss and aggregation by name (arXiv 2402.03300)."""

    Settings = GRPOSettings
    settings: GRPOSettings
    medium = "text"
    refills = True
    headline = "reward/mean"
    unit = "texts"

    def __init__(self, settings: GRPOSettings) -> None:
        super().__init__(settings)
        self.advantage_of = settings.advantage.part("advantages", "algorithm.advantage")
        self.loss_of = settings.loss.part("losses", "algorithm.loss")
        self.whole_groups = settings.loss.name in WHOLE_GROUPS

    def check(self, config: Any) -> None:
        if self.settings.advantage.name == "gigpo":
            raise ConfigError("algorithm.advantage: gigpo compares turns, and a text here is one turn; grpo works")
        size, training = config.training.group_size, config.training
        if self.whole_groups and (training.updates_per_iteration > 1 or training.micro_batch_size % size):
            raise ConfigError(
                f"training: '{self.settings.loss.name}' looks at whole groups of {size} at once; "
                f"updates_per_iteration=1 and micro_batch_size={size} work"
            )

    @property
    def uses_reference(self) -> bool:
        return self.settings.kl_weight > 0

    def items(self, config: Any) -> int:
        return config.training.group_size

    def collect(self, actor: "TextActor", batch: Batch) -> Experience:
        rollout, batch, scores = actor.sample_and_score(batch)
        baseline = actor.baseline(batch) if self.settings.advantage.name == "remax" else None

        record = actor.record(rollout, batch, scores, baseline)
        assert record.entropy is not None
        if self.settings.unlikeliness > 0:
            likelihood = masked_mean(record.log_prob, record.mask)
            record.reward = unlikeliness(record.reward, likelihood, record.group, self.settings.unlikeliness)
        ended = actor.gather(rollout.ended)
        counted = record.mask & ended[:, None] if self.settings.mask_truncated else record.mask
        weight = action_weights(counted, self.settings.aggregation, actor.config.rollout.max_new_tokens)
        weight = weight * len(record.group)
        if self.settings.entropy_share < 1:
            weight = weight * uncertain(record.entropy, counted, self.settings.entropy_share)
        advantage = self.advantages(record)

        rows, length = len(batch), rollout.mask.shape[1]
        metrics = actor.measured(scores, record.group) | {
            "text/tokens": record.mask.sum(1).float().mean().item(),
            "text/cut": 1 - ended.float().mean().item(),
            "text/entropy": record.entropy[record.mask].mean().item(),
        }
        metrics |= actor.metrics
        actor.metrics = {}
        return Experience(
            batch,
            metrics,
            rollout,
            scores,
            actor.mine(record.reward, rows),
            actor.mine(record.group, rows),
            actor.mine(advantage, rows)[:, :length],
            actor.mine(weight, rows)[:, :length],
            self.whole_groups,
        )

    def advantages(self, record: Record) -> Tensor:
        """[B, T] what each token earned."""
        advantage = self.advantage_of(record)
        if advantage.dim() == 1:
            advantage = advantage[:, None].expand_as(record.mask)
        if self.settings.empg is not None:
            assert record.entropy is not None
            advantage = entropy_modulated(advantage, record.entropy, record.mask, **self.settings.empg.model_dump())
        return advantage

    def verify(self, policy: LanguagePolicy, experience: Experience) -> None:
        policy.verify(experience.rollout)

    def losses(self, policy: LanguagePolicy, experience: Experience, items: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        rows, rollout = items[:, 0], experience.rollout
        mask = rollout.mask[rows]
        log_prob, entropy = policy.log_probs(rollout, rows)
        tokens = ScoredTokens(
            log_prob,
            rollout.log_prob[rows],
            experience.advantage[rows],
            mask,
            experience.group[rows],
            experience.reward[rows],
        )
        losses = self.loss_of(tokens)
        metrics = {
            "policy/ratio": masked_mean((log_prob - tokens.old_log_prob).exp(), mask),
            "policy/entropy": masked_mean(entropy, mask),
        }
        if self.uses_reference:
            with torch.no_grad(), policy.reference():
                reference, _ = policy.log_probs(rollout, rows)
            divergence = sampled_kl(log_prob, reference, self.settings.kl_estimator)
            losses = losses + self.settings.kl_weight * divergence
            metrics["policy/kl"] = masked_mean(divergence, mask)
        return (losses.where(mask, 0) * experience.weight[rows]).sum(1), metrics
