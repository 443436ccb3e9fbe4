"""Settings that may change when a run is resumed, and settings that may not, since its checkpoints would not fit."""

from collections.abc import Mapping
from typing import Any

from flowalign.config import BaseConfig
from flowalign.errors import ConfigError
from flowalign.runs.environment import flat

UNSAID = ("name", "output")
"""Settings that say where the folder is; they change without a warning, since the user moved it."""


def check_resumable(before: Mapping[str, Any], config: BaseConfig) -> None:
    """Refuse to resume a run whose checkpoint does not fit the configuration.

    Args:
        before: configuration of the checkpoint.

    Raises:
        ConfigError: names the setting.
    """
    old, new = _fixed(before), _fixed(config.model_dump(mode="json"))
    for key, value in old.items():
        if new[key] != value:
            raise ConfigError(
                f"{key}: the run was trained with {_shown(value)} and cannot go on with {_shown(new[key])}; "
                "name=... starts another run"
            )


def changed(before: Mapping[str, Any], config: BaseConfig) -> list[str]:
    """Changed settings as 'key: old -> new', compared with the configuration `before`."""
    old, new = flat(dict(before)), flat(config.model_dump(mode="json"))
    return [
        f"{key}: {_shown(old.get(key))} -> {_shown(new.get(key))}"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key) and key not in UNSAID
    ]


def _fixed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings on which the tensors and states of a checkpoint depend."""
    model, training = config["model"], config["training"]
    lora = model["lora"] or {}
    plan = config["rollout"].get("plan", {}).get("name")
    adapts = plan == "calibrated"
    return {
        "model.kind": model["kind"],
        "model.lora": "a LoRA" if model["lora"] else "all weights",
        "model.lora.path": lora.get("path"),
        "model.lora.rank": lora.get("rank"),
        "model.lora.targets": lora.get("targets"),
        "algorithm.name": config["algorithm"]["name"],
        "data.selection.name": config["data"]["selection"]["name"],
        "training.ema_decay": "no average" if training["ema_decay"] is None else "an average",
        "training.optimizer.bits": training["optimizer"]["bits"],
        "rollout.plan.name": plan if adapts else "a plan that does not adapt",
        "rollout.steps": config["rollout"]["steps"] if adapts else None,
    }


def _shown(value: object) -> str:
    return "null" if value is None else str(value)
