"""The rewards that a configuration names, built; no model but their own is imported for it."""

from collections.abc import Sequence

from flowalign import registry
from flowalign.config.sections import Named, Weighted
from flowalign.errors import ConfigError
from rewards import Reward, WeightedSum, as_reward, spec_of


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
    if not named:
        raise ConfigError(f"{where}: name at least one, e.g. {where}: [{{name: clip_score}}]")
    rewards, weights = build_rewards(named, where), [entry.weight for entry in named]
    return rewards[0] if weights == [1.0] else WeightedSum(rewards, weights)
