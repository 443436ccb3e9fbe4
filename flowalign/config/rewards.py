"""The rewards that a configuration names, built; no model but their own is imported for it."""

import inspect
from collections.abc import Sequence

from flowalign import registry
from flowalign.config.sections import Named, Weighted
from flowalign.errors import ConfigError
from rewards import Reward, WeightedSum, as_reward, spec_of
from rewards.references import Referenced


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


def referenced(named: Sequence[Named], where: str = "rewards") -> list[Reward]:
    """Build the rewards whose values are compared with reference scores, also inside others; each once.

    Raises:
        ConfigError: there is none, or two of one name, whose scores the metadata could not tell apart.
    """
    compared: list[Named] = []
    for entry in named:
        for target, settings in registry.with_settings(entry.name, entry.settings):
            if inspect.isclass(target) and issubclass(target, Referenced):
                inner = [settings["reward"]] if "reward" in settings else settings["rewards"]
                compared += [reward for reward in (Named(**entry) for entry in inner) if reward not in compared]
    if not compared:
        raise ConfigError(
            f"{where}: none is compared with reference scores; bounded_centred, calibrated and log_sigmoid are"
        )
    rewards = build_rewards(compared, where)
    names = [reward.name for reward in rewards]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{where}: two rewards called '{twice[0]}' with other settings; their scores would mix")
    return rewards
