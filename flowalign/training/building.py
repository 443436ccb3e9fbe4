"""The models and rewards that a configuration names, built."""

from collections.abc import Sequence
from typing import Any

import torch

from flowalign import registry
from flowalign.config.sections import BaseConfig, Named, Weighted
from flowalign.errors import ConfigError
from flowalign.training.medium import MEDIA
from rewards import Reward, WeightedSum, as_reward, spec_of


def build_policy(config: BaseConfig, device: torch.device | str = "cpu") -> Any:
    """Load the model of a configuration, without anything trainable yet."""
    return MEDIA[config.medium].policy(config, device)


def make_trainable(policy: Any, model: Any, keep_reference: bool) -> None:
    """Put on the policy what a model section asks for: an adapter or all weights, recomputed or compiled blocks.

    Args:
        keep_reference: the start weights are needed in training.
    """
    if model.lora is not None:
        policy.add_lora(model.lora.rank, model.lora.alpha, model.lora.targets, model.lora.init)
    else:
        if keep_reference:
            policy.keep_reference()
        policy.train_all()
    if model.gradient_checkpointing:
        policy.checkpoint_gradients()
    if getattr(model, "compile", False):
        policy.compile()


def build_rewards(named: Sequence[Named], where: str = "rewards") -> list[Reward]:
    """Configured rewards, each of which gives one value a sample."""
    rewards = []
    for i, entry in enumerate(named):
        rewards.append(as_reward(registry.build("rewards", entry.name, entry.settings, f"{where}.{i}")))
        if spec_of(rewards[-1]).kind == "pairwise":
            raise ConfigError(f"{where}.{i}: '{entry.name}' compares pairs; wrap it in 'win_rate'")
    return rewards


def build_reward(named: Sequence[Weighted], where: str = "rewards") -> Reward:
    """The weighted sum of configured rewards; a single one of weight 1 stays itself."""
    rewards, weights = build_rewards(named, where), [entry.weight for entry in named]
    return rewards[0] if weights == [1.0] else WeightedSum(rewards, weights)
