"""What the algorithms of language models share: every part by name.

Rollout: a group of completions of each prompt, every token an action. Credit: `advantage`, one of the core's, of one
reward a completion or one a step; then `unlikeliness`, `empg` and the share of most entropy. Loss: `loss`, one of the
core's, summed up by `aggregation`, plus an estimate of the KL to the start weights. `off_policy` weighs tokens that an
engine of other numerics drew. A method that adds to this, a teacher or demonstrations, is a subclass with its
own file.
"""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from flowalign import registry
from flowalign.algorithms import base
from flowalign.algorithms.policy_gradient import ActionExperience, PolicyGradient, PolicyGradientSettings
from flowalign.config import Data, Named, TextConfig
from flowalign.core.aggregation import Aggregation, action_weights
from flowalign.core.divergences import KLEstimate, sampled_kl
from flowalign.core.entropy import entropy_modulated, uncertain, unlikeliness
from flowalign.core.losses import LooksAt
from flowalign.core.off_policy import kept
from flowalign.core.record import Actions, Record, masked_mean, masked_sum
from flowalign.data import Prompts
from flowalign.data.batches import Batch
from flowalign.errors import ConfigError
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.rollout import TextRollout
from flowalign.policies.language.teacher_forcing import rescored
from flowalign.rollouts.language import (
    LanguageSampler,
    SampledTexts,
    baseline,
    gathered_collision,
    gathered_influence,
    gathered_reference,
    gathered_states,
    record_of_texts,
)
from flowalign.rollouts.processes import Processes


class Modulation(base.AlgorithmSettings):
    """EMPG's settings, on turns, or single tokens where there are none; see `core.entropy.entropy_modulated`."""

    sharpness: float = Field(1.0, ge=0)
    clarity: float = Field(0.05, ge=0)
    clarity_sharpness: float = Field(1.0, ge=0)


class LanguageSettings(PolicyGradientSettings):
    advantage: Named = Named(name="grpo", unbiased=True)
    loss: Named = Named(name="ppo")
    aggregation: Aggregation | None = None
    """Mean over all tokens, over each text's ('sequence'), over texts of sums ('sum'), that over max_new_tokens
    ('constant'); default 'token', or 'sequence' with a loss of whole texts (gspo, pacs, reg_grpo), as published."""
    entropy_weight: float = 0.0
    """Weight of the tokens' entropy in the loss, a bonus for staying uncertain (verl's entropy_coeff)."""
    kl_estimate: KLEstimate = "k3"
    kl_correction: bool = False
    """Whether the divergence is multiplied by the loss's ratio (with `gspo` the text's), so that its gradient is the
    KL's own (arXiv 2512.02556; TRL's default)."""
    mask_truncated: bool = False
    """Whether texts that were cut at max_new_tokens teach nothing (DAPO's overlong filtering)."""
    unlikeliness: float = Field(0.0, ge=0, le=1)
    """Share of its reward that the likeliest of a group's right texts loses (arXiv 2506.02355)."""
    entropy_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the tokens to learn from, the most uncertain ones when they were sampled; TRL takes the most uncertain
    ones of a micro-batch under the current weights."""
    sequence_mask: Annotated[float, Field(gt=0)] | None = None
    """Largest fall of a text's log-probability, in nats a token, beyond which a negative advantage teaches nothing
    (DeepSeek-V3.2, arXiv 2512.02556; TRL's off_policy_mask_threshold)."""
    empg: Modulation | None = None
    """Settings by which entropy modulates advantages (arXiv 2509.09265); null: it does not."""


class LanguageAlgorithm(PolicyGradient[TextConfig, LanguageSampler, LanguagePolicy, TextRollout]):
    """A group of completions of each prompt, its advantage, loss and aggregation by name."""

    Settings: ClassVar[type[LanguageSettings]] = LanguageSettings
    settings: LanguageSettings
    kind = "text"
    fields = frozenset({"rewards", "baseline", "state", "collision", "influence", "reference"})
    piece: ClassVar[LooksAt] = "group"
    takes_turns: ClassVar[bool] = True
    """Whether every text is sampled, so that it may be an episode with an environment."""
    opens_masks: ClassVar[bool] = False
    """Whether it looks at nothing but tokens and their log-probabilities, so that masked diffusion may open them."""
    unit = "texts"

    def read(self, data: Data) -> Prompts:
        prompts, key = super().read(data), getattr(self.settings, "demonstration", None)
        for text, record in zip(prompts.texts, prompts.metadata, strict=True):
            if key is not None and key not in record:
                raise ConfigError(f"data.prompts: no '{key}' with the prompt {text[:60]!r} to learn from")
        return prompts

    def check(self, config: TextConfig) -> None:
        super().check(config)
        if config.environment is not None and not self.takes_turns:
            raise ConfigError(
                f"algorithm: '{config.algorithm.name}' learns from demonstrations, which are texts without turns; with "
                "an environment grpo works"
            )
        if config.model.diffusion is not None and (not self.opens_masks or self.needs("state")):
            raise ConfigError(
                f"model.diffusion: '{config.algorithm.name}' with the advantage '{self.settings.advantage.name}' looks "
                "at what came before a token, and masks open in any order; dflow_grpo works"
            )
        if getattr(self.advantage_of, "centres_steps", False):
            for i, reward in enumerate(config.rewards):
                kinds = registry.rewards_within(reward.name, reward.settings)
                if any(getattr(kind, "bounds_sum", False) for kind in kinds):
                    raise ConfigError(
                        f"algorithm.advantage: '{self.settings.advantage.name}' takes a mean off every step's reward, "
                        f"so that the bound in rewards.{i} no longer holds; process_returns works"
                    )
        if config.rollout.engine.inside and self.settings.off_policy is None:
            raise ConfigError(
                "rollout.engine: vllm's log-probabilities are not a forward pass's; "
                "algorithm.off_policy={level: token} weighs the difference"
            )
        size, training = config.training.group_size, config.training
        if self.loss_looks_at == "group" and (training.updates_per_iteration > 1 or training.micro_batch_size % size):
            raise ConfigError(
                f"training: '{self.settings.loss.name}' looks at whole groups of {size} at once; "
                f"updates_per_iteration=1 and micro_batch_size={size} work"
            )

    @property
    def uses_reference(self) -> bool:
        return super().uses_reference or self.needs("reference")

    @property
    def aggregation(self) -> Aggregation:
        default: Aggregation = getattr(self.loss_of, "aggregation", "token")
        return self.settings.aggregation or default

    def items(self, config: TextConfig) -> int:
        return config.training.group_size

    def rollout(self, sampler: LanguageSampler, batch: Batch) -> tuple[TextRollout, Batch]:
        """A text of every sample of the batch."""
        return self.sampled(sampler, batch), batch

    def rescored(self, sampler: LanguageSampler, rollout: TextRollout) -> TextRollout:
        return rescored(sampler.policy, rollout, sampler.config.rollout.batch_size)

    def sampled(self, sampler: LanguageSampler, batch: Batch) -> TextRollout:
        """A text of every sample of the batch."""
        return sampler.rollout(batch)

    def gathered(self, sampled: SampledTexts, reward: Tensor, processes: Processes) -> Record:
        return record_of_texts(sampled, reward, processes)

    def record(self, sampled: SampledTexts, processes: Processes) -> Record:
        record = super().record(sampled, processes)
        if self.needs("baseline"):
            record.baseline = processes.gather(baseline(sampled).to(processes.device))
        if self.needs("state"):
            record.state = gathered_states(sampled, processes)
        if self.needs("collision"):
            record.collision = gathered_collision(sampled, processes)
        if self.needs("influence"):
            record.influence = gathered_influence(sampled, processes)
        if self.needs("reference"):
            record.reference = gathered_reference(sampled, processes)
        if self.settings.unlikeliness > 0:
            likelihood = masked_mean(record.log_prob, record.mask)
            record.reward = unlikeliness(record.reward, likelihood, record.group, self.settings.unlikeliness)
        return record

    def experience(self, sampled: SampledTexts, record: Record, processes: Processes) -> ActionExperience:
        experience = super().experience(sampled, record, processes)
        experience.all_teach |= self.settings.entropy_weight != 0
        return experience

    def weights(self, sampler: LanguageSampler, record: Record) -> tuple[Tensor, Tensor]:
        """[B, T] whose product with the losses has the aggregated loss as its mean over B of sums over T; of the policy
        loss, only uncertain tokens count where `entropy_share` says so."""
        assert record.entropy is not None
        counted, share = self.counted(record), self.settings.entropy_share
        weight = action_weights(counted, self.aggregation, sampler.config.most_tokens) * len(record.group)
        return weight * uncertain(record.entropy, counted, share) if share < 1 else weight, weight

    def counted(self, record: Record) -> Tensor:
        """[B, T] bool: the tokens that are learned from."""
        assert record.ended is not None
        return record.mask & record.ended[:, None] if self.settings.mask_truncated else record.mask

    def record_metrics(self, record: Record) -> dict[str, float]:
        assert record.entropy is not None and record.ended is not None
        return {
            "text/tokens": record.mask.sum(1).float().mean().item(),
            "text/cut": 1 - record.ended.float().mean().item(),
            "text/entropy": record.entropy[record.mask].mean().item(),
        }

    def items_of(self, rollout: TextRollout) -> Tensor:
        """[N, 1] the rows."""
        return torch.arange(len(rollout), device=rollout.mask.device)[:, None]

    def advantages(self, record: Record) -> Tensor:
        """[B, T] what each token earned."""
        advantage = super().advantages(record)
        if self.settings.empg is not None:
            assert record.entropy is not None
            settings = self.settings.empg.model_dump()
            advantage = entropy_modulated(advantage, record.entropy, record.mask, **settings, turn=record.turn)
        return advantage

    def losses(
        self, policy: LanguagePolicy, experience: ActionExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        rows, rollout = items[:, 0], experience.rollout
        mask = rollout.mask[rows]
        bonus = self.settings.entropy_weight
        log_prob, entropy = policy.log_probs(rollout, rows, with_gradient=bonus != 0)
        tokens = Actions(
            log_prob=log_prob,
            old_log_prob=rollout.log_prob[rows],
            advantage=experience.advantage[rows],
            mask=mask,
            group=experience.group[rows],
            reward=experience.reward[rows],
        )
        losses, values = self.token_losses(experience, rows, tokens)
        if self.settings.sequence_mask is not None:
            keep = kept(log_prob, tokens.old_log_prob, tokens.advantage, mask, self.settings.sequence_mask)
            losses = losses * keep
            values["policy/sequence_mask"] = 1 - keep.float()
        values |= {"policy/ratio": tokens.ratio, "policy/entropy": entropy.detach()}
        total = masked_sum(losses * experience.loss_weight[rows], mask)
        if bonus:
            total = total - bonus * masked_sum(entropy * experience.divergence_weight[rows], mask)
        for name, (coefficient, divergence) in self.penalties(policy, experience, rows, tokens).items():
            total = total + coefficient * masked_sum(divergence * experience.divergence_weight[rows], mask)
            values[name] = divergence
        return total, {name: masked_mean(each, mask) for name, each in values.items()}

    def replays_old(self, config: TextConfig) -> bool:
        """Whether weights are in low precision, where a forward pass of whole texts rounds otherwise than sampling, or
        another library sampled."""
        return config.model.compute_dtype != "float32" or config.rollout.engine.served("text") is not None

    def few(self, experience: ActionExperience) -> Tensor:
        return experience.items[:4]

    def replay(self, policy: LanguagePolicy, experience: ActionExperience, items: Tensor, keep: bool) -> Tensor:
        rows, rollout, sampled = items[:, 0], experience.rollout, len(experience.batch)
        # texts that were not sampled come after the batch's own
        fresh = experience.fresh[rows.clamp(max=sampled - 1)] & (rows < sampled)
        log_prob = policy.log_probs(rollout, rows)[0].detach()
        log_ratio, mask = log_prob - rollout.log_prob[rows], rollout.mask[rows]
        if keep:
            rollout.log_prob[rows[fresh]] = log_prob.where(mask, 0)[fresh]
        if self.loss_looks_at == "action":
            log_ratio = log_ratio.abs()
        return masked_mean(log_ratio, mask).where(fresh, torch.nan)[:, None]

    def token_losses(
        self, experience: ActionExperience, rows: Tensor, tokens: Actions
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """[N, T] losses of these rows' tokens, and values for the metrics by name."""
        return self.named_loss(tokens)

    def penalties(
        self, policy: LanguagePolicy, experience: ActionExperience, rows: Tensor, tokens: Actions
    ) -> dict[str, tuple[float, Tensor]]:
        """Coefficients and divergences [N, T] that are added to the loss, by the names of their metrics.

        Neither off_policy nor entropy_share weighs them, as in TRL and verl.
        """
        if self.settings.kl_weight == 0:
            return {}
        with torch.no_grad(), self.referred(policy):
            reference, _ = policy.log_probs(experience.rollout, rows)
        divergence = sampled_kl(tokens.log_prob, reference, self.settings.kl_estimate)
        if self.settings.kl_correction:
            of_rows = getattr(self.loss_of, "ratio_of_rows", False)
            divergence = divergence * (tokens.row_ratio if of_rows else tokens.ratio)
        return {"policy/kl": (self.settings.kl_weight, divergence)}
