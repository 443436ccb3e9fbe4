"""What a run ran with: its configuration, the versions of packages, and the machine."""

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator

from flowalign.runs.files import write_atomically

PACKAGES = ("flowalign", "torch", "diffusers", "transformers", "accelerate", "peft", "numpy")


def record_environment(folder: Path, config: str, accelerator: Accelerator) -> None:
    """Write config.yaml, which is the text `config`, and versions.yaml into a run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "config.yaml", config)
    versions = {name: version(name) for name in PACKAGES}
    versions |= {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if accelerator.device.type == "cuda" else "cpu",
        "processes": accelerator.num_processes,
    }
    write_atomically(folder / "versions.yaml", yaml.safe_dump(versions, sort_keys=False))


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as 'section.key', for trackers that take plain values only."""
    pairs: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            pairs |= flat(value, f"{prefix}{key}.")
        else:
            pairs[prefix + key] = value if isinstance(value, int | float | str | bool) else str(value)
    return pairs
