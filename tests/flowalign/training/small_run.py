"""The small run that tests of the trainer change: two groups of four pictures, one stochastic step each."""

from copy import deepcopy
from pathlib import Path
from typing import Any


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """Its configuration; changes are 'section.key': value."""
    values: dict[str, Any] = {
        "model": {"path": "tiny_sd3", "lora": {"rank": 2, "alpha": 8}, "encode": {"max_sequence_length": 0}},
        "data": {"prompts": "shapes_train", "where": {"category": ["counting"]}},
        "rewards": [{"name": "shapes"}],
        "algorithm": {"name": "flow_grpo", "loss": {"clip_range": 0.01}},
        "rollout": {"steps": 3, "sigmas": [1.0, 0.6, 0.3], "plan": {"name": "window", "start": 1, "size": 1}},
        "evaluation": {},
        "training": {
            "iterations": 4,
            "prompts_per_iteration": 2,
            "group_size": 4,
            "updates_per_iteration": 2,
            "checkpoint_every": 1,
            "optimizer": {"learning_rate": 1e-3, "schedule": "linear"},
        },
        "output": str(folder),
        "name": "run",
    }
    for key, value in changes.items():
        *sections, last = key.split(".")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = deepcopy(value)
    return values
