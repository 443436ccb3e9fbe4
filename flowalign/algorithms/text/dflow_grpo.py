"""dFlowGRPO: GRPO on the denoising steps of masked diffusion (arXiv 2605.09291, and its code).

Rollout: a group of texts of each prompt, opened from masks by `model.diffusion`. Credit: GRPO's, over the standard
deviation of the batch. Loss: of each step, PPO's clip of one ratio, the geometric mean of its positions' ratios of
transition probabilities; then the mean over steps. The last step, which opens whatever is left, does not learn.

The code estimates each transition probability by samples of the model's prediction. From a masked source its
expectation is known, and taken here: p / p_old of a position that opens, 1 of one that stays or was open before. The
schedule's rates cancel. `grpo` on the same model is the code's token_level_loss, which clips each position's ratio.
Departure: `kl_weight` weighs the divergence of each token in the place of a step's.
"""

from dataclasses import replace

import torch
from torch import Tensor

from flowalign.algorithms.policy_gradient import ActionExperience
from flowalign.algorithms.text import base as language
from flowalign.config import Named, TextConfig
from flowalign.core.record import Actions, ByTurn, Record
from flowalign.errors import ConfigError
from flowalign.rollouts.language import LanguageSampler, SampledTexts
from flowalign.rollouts.processes import Processes


class DFlowGRPOSettings(language.LanguageSettings):
    advantage: Named = Named(name="grpo", scale="batch", unbiased=True)
    loss: Named = Named(name="ppo", clip_range=1e-3, clip_range_high=1.5e-3)
    last_step: bool = False
    """Whether the last step learns too."""


class DFlowGRPO(language.LanguageAlgorithm):
    """dFlowGRPO on masked diffusion of texts: a ratio a denoising step (arXiv 2605.09291)."""

    name = "dflow_grpo"
    Settings = DFlowGRPOSettings
    settings: DFlowGRPOSettings
    opens_masks = True

    def check(self, config: TextConfig) -> None:
        super().check(config)
        if config.model.diffusion is None:
            raise ConfigError("algorithm: 'dflow_grpo' learns from steps of masked diffusion; model.diffusion={} works")
        if self.settings.aggregation is not None:
            raise ConfigError("algorithm.aggregation: dflow_grpo takes the mean over steps; null works")
        if self.learning(config) == 0:
            raise ConfigError("model.diffusion.steps: the last of 1 does not learn; algorithm.last_step=true works")

    def learning(self, config: TextConfig) -> int:
        """Number of the steps that learn, the first ones."""
        assert config.model.diffusion is not None, "checked when it was read"
        return config.model.diffusion.steps - (not self.settings.last_step)

    def weights(self, sampler: LanguageSampler, record: Record) -> tuple[Tensor, Tensor]:
        """As of the base; the policy losses of a text's steps are added up and divided by the number of steps."""
        loss_weight, divergence_weight = super().weights(sampler, record)
        return (loss_weight != 0) / self.learning(sampler.config), divergence_weight

    def experience(self, sampled: SampledTexts, record: Record, processes: Processes) -> ActionExperience:
        experience = super().experience(sampled, record, processes)
        learns = sampled.rollout.step < self.learning(sampled.sampler.config)
        experience.loss_weight = experience.loss_weight * learns
        return experience

    def token_losses(
        self, experience: ActionExperience, rows: Tensor, tokens: Actions
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """[N, T] losses of steps, each divided among the positions that it opened."""
        step = ByTurn(experience.rollout.step[rows].where(tokens.mask, 0), tokens.mask)
        opened = step.sum(torch.ones_like(tokens.log_prob))
        positions = tokens.mask.sum(1, keepdim=True)
        steps = replace(
            tokens,
            log_prob=step.sum(tokens.log_prob) / positions,
            old_log_prob=step.sum(tokens.old_log_prob) / positions,
            advantage=step.sum(tokens.advantage) / opened.clamp(min=1),
            mask=opened > 0,
        )
        losses, values = self.named_loss(steps)
        return step.spread(losses / opened.clamp(min=1)), {name: step.spread(value) for name, value in values.items()}
