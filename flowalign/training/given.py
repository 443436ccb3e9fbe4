"""Names by which a run's folder records a policy and a reward that were handed over in Python."""

import sys
from pathlib import Path
from typing import Any

from flowalign import registry
from flowalign.config import BaseConfig, Lora, Weighted
from flowalign.data import ASSETS
from flowalign.policies.base import Policy
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.language.policy import LanguagePolicy
from rewards import WeightedSum, as_reward
from rewards.base import FunctionReward


def recorded(config: BaseConfig, policy: Policy | None, reward: object) -> BaseConfig:
    """The configuration with the names of a policy and a reward that were handed over in Python."""
    changes: dict[str, Any] = {}
    if policy is not None:
        model: dict[str, Any] = {"path": policy_name(policy), "dtype": str(policy.dtype).removeprefix("torch.")}
        if isinstance(policy, DiffusersPolicy):
            model["encode"] = policy.encoder.options
        if isinstance(policy, LanguagePolicy):
            model |= {"chat": policy.chat, "system": policy.system, "padding": policy.padding}
            model["chat_template_kwargs"] = policy.template_arguments
        if policy.lora_config is not None:
            lora = policy.lora_config
            init = lora.init_lora_weights
            model["lora"] = Lora(path=policy.lora_path, rank=lora.r, alpha=lora.lora_alpha, init=init)
        changes["model"] = config.model.model_copy(update=model)
    if reward is not None:
        changes["rewards"] = reward_names(reward)
    return config.model_copy(update=changes)


def policy_name(policy: Policy) -> str:
    """Path, hub name or shipped name that a policy was loaded from; `registry.GIVEN` and its class if unknown."""
    owner = policy.pipeline if isinstance(policy, DiffusersPolicy) else policy.network
    path = owner.config.get("_name_or_path") if isinstance(owner.config, dict) else owner.config._name_or_path
    if not path:
        return registry.GIVEN + type(owner).__name__
    return Path(path).name if Path(path).parent == ASSETS else str(path)


def reward_names(reward: Any) -> list[Weighted]:
    """Configuration entries of a reward; `registry.GIVEN` and its name if a configuration cannot build it."""
    if hasattr(reward, "entries"):
        return reward.entries()
    if isinstance(reward, WeightedSum):
        pairs = zip(reward.rewards, reward.weights, strict=True)
        return [entry.model_copy(update={"weight": w}) for term, w in pairs for entry in reward_names(term)]
    function = reward.function if isinstance(reward, FunctionReward) else reward
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<>")
    if module != "__main__" and getattr(sys.modules.get(str(module)), name, None) is function:
        return [Weighted(name=f"{module}:{name}")]
    return [Weighted(name=registry.GIVEN + as_reward(reward).name)]
